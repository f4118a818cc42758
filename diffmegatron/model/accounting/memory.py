"""Memory of each rank by part, for every layout of the recipe."""

from dataclasses import dataclass, replace

from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import (
    layer_tensors,
    stage_kinds,
    stage_outer_tensors,
    stage_tensors,
)
from diffmegatron.config.trainable_patterns import trained_parts, trains_everything
from diffmegatron.model.accounting import activations
from diffmegatron.model.accounting.activations import BYTES, FLOAT32, Device
from diffmegatron.model.accounting.zero_3 import count_gathers

# Number of elements in the bucket with which ZeRO reduces gradients (reduce_bucket_size).
REDUCE_BUCKET = 50_000_000
FLOAT64 = 8


@dataclass(frozen=True)
class Moment:
    """Bytes of temporary memory at one moment of the forward and backward passes.

    Attributes:
        beside: temporary memory beside the kept activations.
        freed: part of the kept activations that has been freed by then.
        gathered: whole weights that ZeRO 3 has gathered by then.
    """

    beside: int = 0
    freed: int = 0
    gathered: int = 0


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a pipeline stage.

    DeepSpeed allocates ``weights``, ``gradients``, ``optimizer`` (master weights and moments) and
    ``communication`` (buckets) for the whole run. The other parts are temporary, and estimates.

    Attributes:
        activations: kept activations when all forward passes in flight are done.
        loss: the loss, and the backward pass of the output layer.
        reduction: the moment when the ZeRO engine copies or reduces the output layer's gradient.
        layer: the backward pass of one layer.
        embedding: the backward pass of the embedding.
        update: memory of the optimizer's update, after the activations are freed.
        host: offloaded memory, which is not part of the total.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    loss: Moment
    reduction: Moment
    layer: Moment
    embedding: Moment
    update: int
    host: int

    @property
    def held(self) -> int:
        """Bytes allocated for the whole run."""
        return self.weights + self.gradients + self.optimizer + self.communication

    @property
    def passes(self) -> Moment:
        """Moment of the passes with the largest estimated memory."""
        moments = (self.loss, self.reduction, self.layer, self.embedding)
        return max(moments, key=lambda each: each.beside + each.gathered - each.freed)

    @property
    def total(self) -> int:
        """Estimated peak: the allocated bytes and the largest temporary part."""
        most = self.passes
        passes = self.activations - most.freed + most.beside + most.gathered
        return self.held + max(passes, self.update)


def memory_by_stage(
    recipe: Recipe, world_size: int, device: Device = "gpu"
) -> tuple[StageMemory, ...]:
    """Return the memory of a rank of each pipeline stage.

    Args:
        recipe: recipe of the run.
        world_size: number of ranks.
        device: device of the layers' operations, which determines what they keep.

    Raises:
        UserError: If ``world_size`` does not fill the layout.
    """
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    return tuple(
        _stage_memory(recipe, stage, shards, microbatches, device)
        for stage in range(recipe.parallel.pipeline)
    )


def peak_memory(recipe: Recipe, world_size: int) -> int:
    """Return the bytes on a rank of the largest pipeline stage, from two stages only.

    The largest is the first stage, which keeps activations of most microbatches, or the last, which
    has the largest update. Both hold a vocabulary matrix, and all stages have as many layers.

    Raises:
        UserError: If ``world_size`` does not fill the layout.
    """
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches, last = recipe.num_microbatches(world_size), recipe.parallel.pipeline - 1
    ends = {0, last}
    return max(_stage_memory(recipe, stage, shards, microbatches, "gpu").total for stage in ends)


def _stage_memory(
    recipe: Recipe, stage: int, shards: int, microbatches: int, device: Device
) -> StageMemory:
    is_last = stage == recipe.parallel.pipeline - 1
    kept = activations.stage_activations(recipe, stage, microbatches, device)
    waiting = activations.offloaded_activations(recipe, stage, microbatches, device)
    states = _states(recipe, stage, shards, microbatches)
    gathered = _gathered_bytes(recipe)
    logits = activations.logits_bytes(recipe, device) if is_last else 0
    layer, layer_freed = activations.layer_backward(recipe, stage, device)
    embedding = activations.embedding_backward(recipe, stage)
    freed = activations.embedding_freed(recipe, stage, microbatches, device) if embedding else 0
    return replace(
        states,
        activations=kept - waiting,
        loss=Moment(logits, 0, gathered["loss"]),
        reduction=_reduction(recipe, stage, shards, microbatches, device) if is_last else Moment(),
        layer=Moment(states.layer.beside + layer, layer_freed, gathered["layer"]),
        embedding=Moment(embedding, freed, gathered["embedding"] if embedding else 0),
        host=states.host + waiting,
    )


def _states(recipe: Recipe, stage: int, shards: int, microbatches: int) -> StageMemory:
    """Return DeepSpeed's allocations, without the few elements that align ZeRO's partitions.

    Args:
        recipe: recipe of the run.
        stage: number of the pipeline stage.
        shards: number of ranks over which ZeRO partitions, data x context parallel.
        microbatches: number of microbatches per step.
    """
    low, high = rank_parameters(recipe, stage)
    trained = sum(trained_parameters(recipe, stage))
    element = BYTES[recipe.training.precision]
    states = StageMemory(
        stage=stage,
        weights=element * low + FLOAT32 * high,
        gradients=FLOAT32 * trained,
        optimizer=3 * FLOAT32 * trained // shards,
        communication=element * REDUCE_BUCKET,
        activations=0,
        loss=Moment(),
        reduction=Moment(),
        layer=Moment(),
        embedding=Moment(),
        update=FLOAT32 * trained // shards,
        host=0,
    )
    if recipe.parallel.zero_stage == 3:
        states = _zero_3(states, recipe, shards)
    elif recipe.parallel.zero_stage == 2:
        states = _zero_2(states, recipe, shards, microbatches)
    elif not recipe.parallel.offload_optimizer:
        states = _zero_1(states, recipe, shards)
    if recipe.parallel.offload_optimizer:
        return _offloaded(states, recipe, shards)
    return states


def _zero_1(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Apply ZeRO 1, whose flat gradients need no bucket (:mod:`diffmegatron.optim.flat_gradients`).

    In float32 the norm of each gradient in the rank's partition is computed in float64.
    """
    if recipe.training.precision == "bf16":
        return replace(states, communication=0, update=0)
    return replace(states, communication=0, update=_float64_norm(states, recipe, shards))


def _float64_norm(states: StageMemory, recipe: Recipe, shards: int) -> int:
    """Return the bytes of a rank's largest partitioned gradient in float64."""
    elements = states.gradients // FLOAT32
    return FLOAT64 * min(largest_trained(recipe, states.stage), elements // shards)


def _zero_2(states: StageMemory, recipe: Recipe, shards: int, microbatches: int) -> StageMemory:
    """Apply ZeRO 2 with partitioned gradients (DeepSpeed's runtime/zero/stage_1_and_2.py).

    The norm of each gradient is computed in float64. The gradients that the backward pass leaves on
    this partition's parameters stay until it ends. Gradients are accumulated from the end of the
    first microbatch on, so that a step of one microbatch has them in the update only.
    """
    norm, elements = _float64_norm(states, recipe, shards), states.gradients // FLOAT32
    update = norm if recipe.training.precision == "bf16" else max(states.update, norm)
    left = BYTES[recipe.training.precision] * elements // shards
    update, gradients = max(update, left), states.gradients // shards
    if microbatches == 1:
        update, gradients = update + gradients, 0
    return replace(
        states,
        gradients=gradients,
        # The bucket is made when the first gradient comes, which is after the loss.
        communication=0,
        layer=Moment(states.communication),
        update=update,
    )


def _zero_3(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Apply ZeRO 3 with partitioned weights (DeepSpeed's runtime/zero/stage3.py)."""
    return replace(
        states,
        weights=states.weights // shards,
        gradients=states.gradients // shards,
    )


def _gathered_bytes(recipe: Recipe) -> dict[str, int]:
    """Return the bytes of weights that ZeRO 3 has gathered at the moments of the passes."""
    if recipe.parallel.zero_stage < 3:
        return dict.fromkeys(("loss", "layer", "embedding"), 0)
    element, gathers = BYTES[recipe.training.precision], count_gathers(recipe)
    return {name: element * elements for name, elements in gathers.whole.items()}


def _offloaded(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Move master weights, Adam's moments and the gradients of their update to host memory.

    ZeRO 1 and 2 also keep the updated partition in the run's precision there, and a buffer of the
    largest parameter, of which the device has another. ZeRO 1 still accumulates all gradients on
    the device in float32, and reduces them in a float32 bucket; it sums a copy of a gradient that
    is larger than the bucket. ZeRO 2 takes the norm in float64.
    """
    element = BYTES[recipe.training.precision]
    partition = states.optimizer // (3 * FLOAT32)
    gradients = FLOAT32 * partition
    if recipe.parallel.zero_stage == 3:
        host = states.optimizer + 2 * gradients
        return replace(states, optimizer=0, gradients=0, update=0, host=host)
    largest = largest_trained(recipe, states.stage)
    buffer = element * largest
    if recipe.parallel.zero_stage == 2:
        held, update = buffer, states.update
    else:
        held = FLOAT32 * REDUCE_BUCKET + buffer
        update = FLOAT32 * largest if largest > REDUCE_BUCKET else 0
    return replace(
        states,
        optimizer=0,
        communication=held,
        update=update,
        host=states.optimizer + gradients + element * partition + buffer,
    )


def _reduction(
    recipe: Recipe, stage: int, shards: int, microbatches: int, device: Device
) -> Moment:
    """Return the moment when the ZeRO engine takes over the output layer's weight gradient.

    With the optimizer offloaded, ZeRO 1 adds each gradient to the others as float32. ZeRO 2
    allocates its bucket, and clones a gradient larger than it; without offload it keeps such a
    gradient until the final norm's gradient arrives, and reduces it in pieces that it copies. A
    tied embedding's gradient comes after all others.
    """
    parallel, element = recipe.parallel, BYTES[recipe.training.precision]
    weight = activations.output_weight(recipe)
    if weight == 0 or parallel.zero_stage == 3:
        return Moment()
    is_too_large, bucket = weight > REDUCE_BUCKET, element * REDUCE_BUCKET
    freed = hidden = activations.final_hidden_bytes(recipe)
    if parallel.offload_optimizer and parallel.zero_stage == 1:
        copy = FLOAT32 * largest_trained(recipe, stage)
    elif parallel.offload_optimizer:
        copy = bucket + (element * weight if is_too_large else 0)
    elif parallel.zero_stage == 2 and is_too_large:
        copy = bucket + element * _reduced_together(recipe, stage, shards)
        freed = activations.final_norm_bytes(recipe, device)
    else:
        return Moment()
    if activations.sums_tied_gradients(recipe):
        freed = activations.embedding_freed(recipe, stage, microbatches, device)
    # Offloaded activations are not on the device.
    is_offloaded = recipe.training.offload_activations
    return Moment(element * weight + copy + hidden, 0 if is_offloaded else freed)


def _reduced_together(recipe: Recipe, stage: int, shards: int) -> int:
    """Return the most elements of the output layer's gradient that ZeRO 2 copies to sum them.

    DeepSpeed cuts a gradient at the bounds of the ranks' partitions, and sums consecutive pieces in
    one copy as soon as they exceed the bucket (``allreduce_and_scatter`` of
    runtime/zero/stage_1_and_2.py). It does not copy a piece that exceeds the bucket alone. The
    output layer is the last matrix of the partitioned gradient.
    """
    weight, matrices = activations.output_weight(recipe), trained_parameters(recipe, stage)[0]
    piece = -(-matrices // shards)
    first = piece - (matrices - weight) % piece
    with_first = max(0, REDUCE_BUCKET - first) // piece + (first <= REDUCE_BUCKET)
    without_first = REDUCE_BUCKET // piece + 1
    copies = [first + with_first * piece] * (with_first > 0)
    copies += [without_first * piece] * (without_first > 1)
    return min(weight, max(copies, default=0))


def _vocabulary_elements(recipe: Recipe) -> int:
    """Return the elements of a vocabulary matrix, the largest parameter, on a tensor rank."""
    return recipe.model.vocab_size * recipe.model.hidden_size // recipe.parallel.tensor


def largest_trained(recipe: Recipe, stage: int) -> int:
    """Return the elements of the largest trained parameter on a tensor-parallel rank."""
    if trains_everything(recipe):
        return _vocabulary_elements(recipe)
    return max(
        tensor.elements(recipe.parallel.tensor)
        for tensor in stage_tensors(recipe, stage)
        if trained_parts(tensor, recipe)
    )


def rank_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Return a rank's numbers of parameters in the run's precision and always in float32.

    The numbers do not include ZeRO 3's partitioning.
    """
    size = recipe.parallel.tensor
    tensors = [(each, 1) for each in stage_outer_tensors(recipe, stage)] + [
        (each, count)
        for kind, count in stage_kinds(recipe, stage)
        for each in layer_tensors(recipe.model, kind)
    ]
    low, high = (
        sum(count * each.elements(size) for each, count in tensors if each.float32 == is_float32)
        for is_float32 in (False, True)
    )
    return low, high


def trained_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Return the trained part of :func:`rank_parameters`, which has optimizer state.

    A fused projection with some frozen rows has optimizer state for all rows.
    """
    if trains_everything(recipe):
        return rank_parameters(recipe, stage)
    counts = [0, 0]
    for tensor in stage_tensors(recipe, stage):
        if trained_parts(tensor, recipe):
            counts[tensor.float32] += tensor.elements(recipe.parallel.tensor)
    return counts[0], counts[1]
