"""Bytes per rank and part, for every layout of the schema."""

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

# Elements of the bucket in which ZeRO reduces gradients (reduce_bucket_size).
REDUCE_BUCKET = 50_000_000
# DeepSpeed's stage3_max_live_parameters (runtime/zero/config.py).
LIVE_PARAMETERS = 1_000_000_000
FLOAT64 = 8


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of a pipeline stage.

    ``weights``, ``gradients``, ``optimizer`` (master weights and Adam's moments) and
    ``communication`` (buckets and gathered weights) are held all along: DeepSpeed's allocations.
    ``activations`` are there at the height of a step, an estimate, and with them in turn
    ``logits`` (the loss and the output layer's gradient) and ``layer`` (one layer's backward
    pass). ``update`` is what the optimizer needs when the activations are freed. ``host`` is what
    is offloaded and not part of the total.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    logits: int
    layer: int
    update: int
    host: int

    @property
    def held(self) -> int:
        """What is there all along."""
        return self.weights + self.gradients + self.optimizer + self.communication

    @property
    def total(self) -> int:
        """The peak: what is held, and the most of what comes and goes. An estimate."""
        return self.held + max(self.activations + max(self.logits, self.layer), self.update)


def memory_by_stage(
    recipe: Recipe, world_size: int, device: Device = "gpu"
) -> tuple[StageMemory, ...]:
    """Memory of a rank of each pipeline stage.

    Args:
        recipe: the recipe.
        world_size: number of ranks.
        device: what the layers' operations keep differs between a GPU and a CPU.

    Raises:
        UserError: ``world_size`` does not fill the layout.
    """
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    return tuple(
        _stage_memory(recipe, stage, shards, microbatches, device)
        for stage in range(recipe.parallel.pipeline)
    )


def peak_memory(recipe: Recipe, world_size: int) -> int:
    """Bytes on a rank of the pipeline stage that needs most, without looking at all of them.

    That is the first, which keeps the activations of most microbatches, or the last, whose update
    takes most; both hold a vocabulary matrix, and those between as many layers.

    Raises:
        UserError: as :func:`memory_by_stage`.
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
    return replace(
        states,
        activations=kept - waiting,
        logits=activations.logits_bytes(recipe, device) if is_last else 0,
        layer=activations.layer_backward(recipe, device),
        host=states.host + waiting,
    )


def _states(recipe: Recipe, stage: int, shards: int) -> StageMemory:
    """What DeepSpeed allocates; the few elements that align ZeRO's partitions are left out.

    Args:
        recipe: the recipe.
        stage: of the pipeline.
        shards: ranks that ZeRO partitions over, data x context parallel.
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
    """Gradients flat from the start, summed in place (:mod:`diffmegatron.optim.flat_gradients`).

    Without a bucket. In float32 the norm is taken of each of the rank's partition in float64.
    """
    if recipe.training.precision == "bf16":
        return replace(states, communication=0, update=0)
    return replace(states, communication=0, update=_float64_norm(states, recipe, shards))


def _float64_norm(states: StageMemory, recipe: Recipe, shards: int) -> int:
    """Bytes of the largest gradient of a rank's partition in float64."""
    elements = states.gradients // FLOAT32
    return FLOAT64 * min(largest_trained(recipe, states.stage), elements // shards)


def _zero_2(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """DeepSpeedZeroOptimizer (runtime/zero/stage_1_and_2.py) with its partition of the gradients.

    The norm is taken of each of them in float64; what the backward pass leaves on the parameters
    of this partition stays until it ends.
    """
    norm, elements = _float64_norm(states, recipe, shards), states.gradients // FLOAT32
    update = norm if recipe.training.precision == "bf16" else max(states.update, norm)
    left = BYTES[recipe.training.precision] * elements // shards
    return replace(states, gradients=states.gradients // shards, update=max(update, left))


def _zero_3(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """DeepSpeedZeroOptimizer_Stage3 (runtime/zero/stage3.py): weights in partitions as well.

    A module's whole weights are gathered before it runs.
    """
    elements = sum(rank_parameters(recipe, states.stage))
    return replace(
        states,
        weights=states.weights // shards,
        gradients=states.gradients // shards,
        communication=states.communication + _gathered_bytes(recipe, elements),
    )


def _gathered_bytes(recipe: Recipe, elements: int) -> int:
    """Whole weights: a layer's and the next one's, or a vocabulary matrix.

    DeepSpeed lets more of them stay until their next use, up to a number of elements.
    """
    model = recipe.model
    attention = max(attention_weights(model, kind) for kind, _ in counted_kinds(model))
    layer = (attention + mlp_weights(model)) // recipe.parallel.tensor
    most = max(2 * layer, _vocabulary_elements(recipe), LIVE_PARAMETERS)
    return BYTES[recipe.training.precision] * min(elements, most)


def _offloaded(states: StageMemory, recipe: Recipe, shards: int) -> StageMemory:
    """Master weights and Adam's moments, and the gradients they are updated by, in host memory.

    ZeRO 1 and 2 also keep there the updated partition in the run's precision and a buffer of the
    largest parameter, of which the device has one as well. ZeRO 1 still accumulates all gradients
    on the device in float32, and reduces them in a float32 bucket.
    """
    element = BYTES[recipe.training.precision]
    partition = states.optimizer // (3 * FLOAT32)
    gradients = FLOAT32 * partition
    if recipe.parallel.zero_stage == 3:
        host = states.optimizer + 2 * gradients
        return replace(states, optimizer=0, gradients=0, update=0, host=host)
    buffer = element * largest_trained(recipe, states.stage)
    bucket = element if recipe.parallel.zero_stage == 2 else FLOAT32
    return replace(
        states,
        optimizer=0,
        communication=bucket * REDUCE_BUCKET + buffer,
        update=0,
        host=states.optimizer + gradients + element * partition + buffer,
    )


def _vocabulary_elements(recipe: Recipe) -> int:
    """Of one vocabulary matrix on a tensor-parallel rank: the largest parameter."""
    return recipe.model.vocab_size * recipe.model.hidden_size // recipe.parallel.tensor


def largest_trained(recipe: Recipe, stage: int) -> int:
    """Of the largest parameter on a tensor-parallel rank that has a gradient."""
    if trains_everything(recipe):
        return _vocabulary_elements(recipe)
    return max(
        tensor.elements(recipe.parallel.tensor)
        for tensor in stage_tensors(recipe, stage)
        if trained_parts(tensor, recipe)
    )


def rank_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Parameters of a rank of ``stage``: in the run's precision, and always in float32.

    ZeRO 3 shares them out further.
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
    """Those of :func:`rank_parameters` that are trained: they alone have optimizer state.

    A fused projection of which some rows are frozen has it for all of them.
    """
    if trains_everything(recipe):
        return rank_parameters(recipe, stage)
    counts = [0, 0]
    for tensor in stage_tensors(recipe, stage):
        if trained_parts(tensor, recipe):
            counts[tensor.float32] += tensor.elements(recipe.parallel.tensor)
    return counts[0], counts[1]
