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
from diffmegatron.model.accounting.parameters import (
    attention_weights,
    counted_kinds,
    mlp_weights,
)

# Number of elements in the bucket with which ZeRO reduces gradients (reduce_bucket_size).
REDUCE_BUCKET = 50_000_000
# DeepSpeed's stage3_max_live_parameters (runtime/zero/config.py).
LIVE_PARAMETERS = 1_000_000_000
FLOAT64 = 8


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a pipeline stage.

    DeepSpeed allocates ``weights``, ``gradients``, ``optimizer`` (master weights and moments) and
    ``communication`` (buckets and gathered weights) for the whole run. The other parts are
    temporary, and estimates.

    Attributes:
        activations: kept activations at the peak of a step.
        logits: memory of the loss and the output layer's gradient, beside the activations.
        layer: memory of one layer's backward pass, beside the activations.
        layer_freed: activations that are freed by the time of ``layer``.
        embedding: memory of the embedding's backward pass on the first stage of a pipeline.
        embedding_freed: activations that are freed by the time of ``embedding``.
        update: memory of the optimizer's update, after the activations are freed.
        host: offloaded memory, which is not part of the total.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    logits: int
    layer: int
    layer_freed: int
    embedding: int
    embedding_freed: int
    update: int
    host: int

    @property
    def held(self) -> int:
        """Bytes allocated for the whole run."""
        return self.weights + self.gradients + self.optimizer + self.communication

    @property
    def passing(self) -> tuple[int, int]:
        """Estimated activations and memory beside them, at the moment with most of both."""
        moments = (
            (self.activations, self.logits),
            (self.activations - self.layer_freed, self.layer),
            (self.activations - self.embedding_freed, self.embedding),
        )
        return max(moments, key=sum)

    @property
    def total(self) -> int:
        """Estimated peak: the allocated bytes and the largest temporary part."""
        return self.held + max(sum(self.passing), self.update)


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
    states = _states(recipe, stage, shards)
    copy = _gradient_copy(recipe, stage)
    embedding = activations.embedding_backward(recipe, stage)
    freed = activations.virtual_stage_bytes(recipe, stage, device) if embedding else 0
    return replace(
        states,
        activations=kept - waiting,
        logits=activations.logits_bytes(recipe, device, copy) if is_last else 0,
        layer=states.layer + activations.layer_backward(recipe, stage, device),
        layer_freed=activations.layer_freed(recipe, device),
        embedding=embedding,
        embedding_freed=0 if recipe.training.offload_activations else round(freed),
        host=states.host + waiting,
    )


def _states(recipe: Recipe, stage: int, shards: int) -> StageMemory:
    """Return DeepSpeed's allocations, without the few elements that align ZeRO's partitions.

    Args:
        recipe: recipe of the run.
        stage: number of the pipeline stage.
        shards: number of ranks over which ZeRO partitions, data x context parallel.
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
        logits=0,
        layer=0,
        layer_freed=0,
        embedding=0,
        embedding_freed=0,
        update=FLOAT32 * trained // shards,
        host=0,
    )
    if recipe.parallel.zero_stage == 3:
        states = _zero_3(states, recipe, shards)
    elif recipe.parallel.zero_stage == 2:
        states = _zero_2(states, recipe, shards)
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


def _zero_2(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Apply ZeRO 2 with partitioned gradients (DeepSpeed's runtime/zero/stage_1_and_2.py).

    The norm of each gradient is computed in float64. The gradients that the backward pass leaves on
    this partition's parameters stay until it ends.
    """
    norm, elements = _float64_norm(states, recipe, shards), states.gradients // FLOAT32
    update = norm if recipe.training.precision == "bf16" else max(states.update, norm)
    left = BYTES[recipe.training.precision] * elements // shards
    return replace(
        states,
        gradients=states.gradients // shards,
        # The bucket is made when the first gradient comes, which is after the loss.
        communication=0,
        layer=states.communication,
        update=max(update, left),
    )


def _zero_3(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Apply ZeRO 3 with partitioned weights (DeepSpeed's runtime/zero/stage3.py).

    The whole weights of a module are gathered before it runs.
    """
    elements = sum(rank_parameters(recipe, states.stage))
    return replace(
        states,
        weights=states.weights // shards,
        gradients=states.gradients // shards,
        communication=states.communication + _gathered_bytes(recipe, elements),
    )


def _gathered_bytes(recipe: Recipe, elements: int) -> int:
    """Return the bytes of gathered weights: two layers' weights, or a vocabulary matrix.

    DeepSpeed keeps gathered weights until their next use, up to a number of elements.
    """
    model = recipe.model
    attention = max(attention_weights(model, kind) for kind, _ in counted_kinds(model))
    layer = (attention + mlp_weights(model)) // recipe.parallel.tensor
    most = max(2 * layer, _vocabulary_elements(recipe), LIVE_PARAMETERS)
    return BYTES[recipe.training.precision] * min(elements, most)


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


def _gradient_copy(recipe: Recipe, stage: int) -> int:
    """Return the bytes that DeepSpeed allocates for the gradient of the output layer's weight.

    With the optimizer offloaded, ZeRO 1 adds each gradient to the others as float32. ZeRO 2 makes
    its bucket, and clones a gradient that is larger than it.
    """
    element, largest = BYTES[recipe.training.precision], largest_trained(recipe, stage)
    if not recipe.parallel.offload_optimizer or recipe.parallel.zero_stage == 3:
        return 0
    if recipe.parallel.zero_stage == 2:
        return element * (REDUCE_BUCKET + (largest if largest > REDUCE_BUCKET else 0))
    return FLOAT32 * largest


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
