"""Estimate of each rank's memory, in bytes."""

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

# DeepSpeed's reduce_bucket_size: elements in the bucket with which ZeRO reduces gradients.
REDUCE_BUCKET = 50_000_000
FLOAT64 = 8


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one moment of the forward and backward passes, in bytes.

    Attributes:
        beside: temporary memory in addition to the saved activations.
        freed: saved activations that are already freed.
        gathered: weights that ZeRO 3 has gathered from the ranks.
    """

    beside: int = 0
    freed: int = 0
    gathered: int = 0


@dataclass(frozen=True)
class StageMemory:
    """Memory of each rank of a pipeline stage, in bytes.

    Attributes:
        weights: weights for the forward pass; with ZeRO 3 this rank's partition.
        gradients: accumulated gradients; with ZeRO 2 and 3 this rank's partition.
        optimizer: this rank's partition of the float32 master weights and of Adam's moments.
        communication: bucket for reducing gradients. ZeRO 2's bucket is part of ``layer`` instead.
            With ZeRO 1 or 2 and an offloaded optimizer, also a buffer for the largest parameter.
        activations: saved activations of all microbatches in flight, except those on the host.
        loss: memory during the loss and the backward pass of the output layer.
        reduction: memory while DeepSpeed copies or reduces the output layer's gradient.
        layer: memory during the backward pass of one layer.
        embedding: memory during the backward pass of the embedding.
        update: temporary memory of the optimizer's update, after the activations are freed.
        host: memory offloaded to the host, which is not part of the total.
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
    def allocated(self) -> int:
        """Memory that is allocated for the whole run."""
        return self.weights + self.gradients + self.optimizer + self.communication

    @property
    def passes(self) -> Moment:
        """Moment of the forward and backward passes with the largest estimated memory."""
        moments = (self.loss, self.reduction, self.layer, self.embedding)
        return max(moments, key=lambda each: each.beside + each.gathered - each.freed)

    @property
    def total(self) -> int:
        """Estimated peak memory."""
        most = self.passes
        passes = self.activations - most.freed + most.beside + most.gathered
        return self.allocated + max(passes, self.update)


def memory_by_stage(
    recipe: Recipe, world_size: int, device: Device = "gpu"
) -> tuple[StageMemory, ...]:
    """Return the memory of a rank, for each pipeline stage."""
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    return tuple(
        _stage_memory(recipe, stage, shards, microbatches, device)
        for stage in range(recipe.parallel.pipeline)
    )


def peak_memory(recipe: Recipe, world_size: int) -> int:
    """Return the estimated peak memory of a GPU, in the pipeline stage where it is largest."""
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
    """Return the memory of weights, gradients, optimizer state and update, without activations.

    ``shards`` is the number of ranks over which ZeRO partitions (data x context parallel).
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
    """Return ``states`` with the changes of ZeRO 1 without offload."""
    if recipe.training.precision == "bf16":
        return replace(states, communication=0, update=0)
    return replace(states, communication=0, update=_float64_norm(states, recipe, shards))


def _float64_norm(states: StageMemory, recipe: Recipe, shards: int) -> int:
    """Return the bytes of the largest gradient in a rank's partition, copied to float64."""
    elements = states.gradients // FLOAT32
    return FLOAT64 * min(largest_trained(recipe, states.stage), elements // shards)


def _zero_2(states: StageMemory, recipe: Recipe, shards: int, microbatches: int) -> StageMemory:
    """Return ``states`` with the changes of ZeRO 2 (DeepSpeed's runtime/zero/stage_1_and_2.py)."""
    norm, elements = _float64_norm(states, recipe, shards), states.gradients // FLOAT32
    update = norm if recipe.training.precision == "bf16" else max(states.update, norm)
    left = BYTES[recipe.training.precision] * elements // shards
    update, gradients = max(update, left), states.gradients // shards
    if microbatches == 1:
        update, gradients = update + gradients, 0
    return replace(
        states,
        gradients=gradients,
        # The bucket is allocated with the first gradient, which is after the loss.
        communication=0,
        layer=Moment(states.communication),
        update=update,
    )


def _zero_3(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    return replace(
        states,
        weights=states.weights // shards,
        gradients=states.gradients // shards,
    )


def _gathered_bytes(recipe: Recipe) -> dict[str, int]:
    """Return the bytes of gathered weights at the moments "loss", "layer" and "embedding"."""
    if recipe.parallel.zero_stage < 3:
        return dict.fromkeys(("loss", "layer", "embedding"), 0)
    element, gathers = BYTES[recipe.training.precision], count_gathers(recipe)
    return {name: element * elements for name, elements in gathers.whole.items()}


def _offloaded(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Return ``states`` with the optimizer offloaded to host memory."""
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
    """Return the memory while DeepSpeed copies or reduces the output layer's weight gradient.

    The copies of ZeRO 3 are not estimated.
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
    is_offloaded = recipe.training.offload_activations
    return Moment(element * weight + copy + hidden, 0 if is_offloaded else freed)


def _reduced_together(recipe: Recipe, stage: int, shards: int) -> int:
    """Return the number of elements in ZeRO 2's largest copy of gradient pieces (output layer).

    DeepSpeed splits a gradient at the boundaries of the ranks' partitions. It copies consecutive
    pieces into one tensor when they exceed the bucket, and reduces this tensor
    (``allreduce_and_scatter`` in runtime/zero/stage_1_and_2.py). A single piece that exceeds the
    bucket is not copied.
    """
    weight, matrices = activations.output_weight(recipe), trained_parameters(recipe, stage)[0]
    piece = -(-matrices // shards)
    first = piece - (matrices - weight) % piece
    with_first = max(0, REDUCE_BUCKET - first) // piece + (first <= REDUCE_BUCKET)
    without_first = REDUCE_BUCKET // piece + 1
    copies = [first + with_first * piece] * (with_first > 0)
    copies += [without_first * piece] * (without_first > 1)
    return min(weight, max(copies, default=0))


def largest_trained(recipe: Recipe, stage: int) -> int:
    """Return the number of elements of a stage's largest trained parameter on a rank.

    If everything is trained, this is a vocabulary matrix. For the stages in the middle, which have
    none, the result is then too large.
    """
    if trains_everything(recipe):
        return activations.vocabulary_elements(recipe)
    return max(
        tensor.elements(recipe.parallel.tensor)
        for tensor in stage_tensors(recipe, stage)
        if trained_parts(tensor, recipe)
    )


def rank_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Return the numbers of parameters on a rank, before ZeRO 3 partitions them.

    Returns:
        Number of parameters in the run's precision, and number of always-float32 parameters.
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
    """Return the numbers of parameters with optimizer state on a rank, before ZeRO partitions them.

    A partly frozen fused projection has optimizer state for all its rows. The two numbers are
    defined as in :func:`rank_parameters`.
    """
    if trains_everything(recipe):
        return rank_parameters(recipe, stage)
    counts = [0, 0]
    for tensor in stage_tensors(recipe, stage):
        if trained_parts(tensor, recipe):
            counts[tensor.float32] += tensor.elements(recipe.parallel.tensor)
    return counts[0], counts[1]
