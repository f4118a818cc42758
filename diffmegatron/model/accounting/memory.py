"""Estimate of each rank's memory, in bytes."""

from dataclasses import dataclass, replace

from diffmegatron.config.fp8_products import fp8_matrices
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import (
    layer_tensors,
    stage_kinds,
    stage_outer_tensors,
    stage_tensors,
)
from diffmegatron.config.trainable_patterns import trained_parts, trains_everything
from diffmegatron.model.accounting import activations, muon
from diffmegatron.model.accounting.activations import BYTES, FLOAT32, Device
from diffmegatron.model.accounting.zero_3 import count_gathers

# DeepSpeed's reduce_bucket_size: number of elements of the bucket in which ZeRO reduces gradients.
REDUCE_BUCKET = 50_000_000
FLOAT64 = 8
# Transformer Engine keeps FP8 copies of a matrix for the products of both passes.
FP8_COPIES = 2


@dataclass(frozen=True)
class Moment:
    """Memory of a rank at one moment of the forward and backward passes, in bytes.

    Attributes:
        beside: temporary memory in addition to the saved activations.
        freed: saved activations that are already freed.
        gathered: weights that ZeRO 3 has gathered from the ranks.
        gradients: gradients that ZeRO 2 makes after the loss of a step's only microbatch.
    """

    beside: int = 0
    freed: int = 0
    gathered: int = 0
    gradients: int = 0

    @property
    def change(self) -> int:
        """Memory that this moment adds to the saved activations."""
        return self.beside + self.gathered + self.gradients - self.freed


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of the rank of a pipeline stage that needs most, in bytes.

    Attributes:
        weights, gradients: only this rank's partition if ZeRO partitions them. Weights include
            their copies in FP8.
        optimizer: this rank's partition of the float32 master weights and of Adam's moments or
            Muon's momentum.
        communication: DeepSpeed's buffers that exist for the whole step.
        activations: saved activations of all microbatches in flight, except those on the host.
        loss: moment of the loss and of the output layer's backward pass.
        reduction: moment when the output layer's gradient is copied or reduced.
        layer: moment of one layer's backward pass, including ZeRO 2's bucket for gradients.
        embedding: moment of the embedding's backward pass.
        update: temporary memory of the optimizer's update, after the activations are freed.
        host: memory offloaded to the host, which is not part of the total.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int = 0
    loss: Moment = Moment()
    reduction: Moment = Moment()
    layer: Moment = Moment()
    embedding: Moment = Moment()
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
        return max(moments, key=lambda each: each.change)

    @property
    def total(self) -> int:
        """Estimated peak memory."""
        return self.allocated + max(self.activations + self.passes.change, self.update)


def memory_by_stage(
    recipe: Recipe, world_size: int, device: Device = "gpu"
) -> tuple[StageMemory, ...]:
    """Return, for each pipeline stage, the memory of one of its ranks."""
    return tuple(
        _stage_memory(recipe, stage, world_size, device)
        for stage in range(recipe.parallel.pipeline)
    )


def peak_memory(recipe: Recipe, world_size: int) -> int:
    """Return the largest estimated peak memory of a GPU over all pipeline stages."""
    # Skip stages in the middle. They have as many layers, but no embedding and no output layer.
    ends = {0, recipe.parallel.pipeline - 1}
    return max(_stage_memory(recipe, stage, world_size, "gpu").total for stage in ends)


def _stage_memory(recipe: Recipe, stage: int, world_size: int, device: Device) -> StageMemory:
    # ZeRO partitions over the data x context parallel ranks.
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    is_last = stage == recipe.parallel.pipeline - 1
    kept = activations.stage_activations(recipe, stage, microbatches, device)
    waiting = 0
    if recipe.training.offload_activations:
        waiting = kept - activations.shared_bytes(recipe)
    iterations = muon.update_bytes(recipe, world_size, stage)
    states = _states(recipe, stage, shards, microbatches, iterations)
    gathered = {"loss": 0, "layer": 0, "embedding": 0}
    if recipe.parallel.zero_stage == 3:
        element = BYTES[recipe.training.precision]
        gathered = {name: element * size for name, size in count_gathers(recipe).whole.items()}
    logits = activations.logits_bytes(recipe, device) if is_last else 0
    layer, layer_freed = activations.layer_backward(recipe, stage, device)
    embedding = activations.embedding_backward(recipe, stage)
    freed = activations.embedding_freed(recipe, stage, microbatches, device) if embedding else 0
    bucket, made = states.layer.beside, states.layer.gradients
    reduction = Moment()
    if is_last:
        reduction = _reduction(recipe, stage, shards, microbatches, device)
        reduction = replace(reduction, gradients=made if reduction.beside else 0)
    return replace(
        states,
        activations=kept - waiting,
        loss=Moment(logits, 0, gathered["loss"]),
        reduction=reduction,
        layer=Moment(bucket + layer, layer_freed, gathered["layer"], made),
        embedding=Moment(bucket + embedding, freed, gathered["embedding"], made)
        if embedding
        else Moment(),
        host=states.host + waiting,
    )


def _states(
    recipe: Recipe, stage: int, shards: int, microbatches: int, iterations: int
) -> StageMemory:
    """Return the memory of weights, gradients, optimizer state and update, without activations.

    ``iterations`` is the temporary memory of Muon's iterations.
    """
    parallel, precision = recipe.parallel, recipe.training.precision
    element = BYTES[precision]
    low, high = rank_parameters(recipe, stage)
    trained = sum(trained_parameters(recipe, stage))
    largest = largest_trained(recipe, stage)
    weights, gradients = element * low + FLOAT32 * high, FLOAT32 * trained
    weights += round(FP8_COPIES * fp8_matrices(recipe, stage))
    partition = trained // shards
    # AdamW has two moments beside the master weights, and Muon one.
    by_muon = muon.muon_elements(recipe, stage)
    states = 3 * trained - by_muon
    optimizer, update = FLOAT32 * states // shards, FLOAT32 * partition
    communication, in_layer, made, host = element * REDUCE_BUCKET, 0, 0, 0
    # DeepSpeed copies each gradient in the rank's partition to float64 to compute its norm.
    norm = FLOAT64 * min(largest, partition)
    if parallel.zero_stage == 3:
        weights, gradients = weights // shards, gradients // shards
        # DeepSpeed copies the gradients of one parameter group at a time to float32.
        update = max(update, iterations + FLOAT32 * by_muon // shards)
    elif parallel.zero_stage == 2:
        # The gradients of the rank's partition also exist in the run's precision. Count them in the
        # update, because no activations are left at the end of the backward pass.
        left = element * trained // shards
        update = max(norm, left, update if precision == "fp32" else 0)
        # AdamW's float32 gradients are freed before Muon's update: the embedding's group is first.
        update = max(update, iterations - FLOAT32 * (trained - by_muon) // shards)
        gradients //= shards
        # The float32 gradients are allocated in the first microbatch.
        if microbatches == 1:
            update, made, gradients = update + gradients, gradients, 0
        # The bucket is allocated after the loss, when the first gradient is computed.
        communication, in_layer = 0, communication
    elif not parallel.offload_optimizer:
        # Flat gradients are reduced in place (diffmegatron.optim.flat_gradients).
        communication, update = 0, max(norm if precision == "fp32" else 0, iterations)
    if parallel.offload_optimizer:
        host, optimizer = optimizer + FLOAT32 * partition, 0
        if parallel.zero_stage == 3:
            host, gradients, update = host + FLOAT32 * partition, 0, iterations
        else:
            # Host and device each have a buffer for the largest parameter.
            communication = element * largest
            host += element * partition + communication
        if parallel.zero_stage == 1:
            communication += FLOAT32 * REDUCE_BUCKET
            update = max(FLOAT32 * largest if largest > REDUCE_BUCKET else 0, iterations)
    return StageMemory(
        stage=stage,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        communication=communication,
        update=update,
        host=host,
        layer=Moment(in_layer, gradients=made),
    )


def _reduction(
    recipe: Recipe, stage: int, shards: int, microbatches: int, device: Device
) -> Moment:
    """Return the memory while ZeRO 1 or 2 copies or reduces the output layer's gradient."""
    parallel, element = recipe.parallel, BYTES[recipe.training.precision]
    weight = activations.output_weight(recipe)
    if weight == 0 or parallel.zero_stage == 3:
        return Moment()
    is_too_large, bucket = weight > REDUCE_BUCKET, element * REDUCE_BUCKET
    freed = hidden = round(activations.hidden_states_bytes(recipe))
    if parallel.offload_optimizer and parallel.zero_stage == 1:
        copy = FLOAT32 * largest_trained(recipe, stage)
    elif parallel.offload_optimizer:
        copy = bucket + (element * weight if is_too_large else 0)
    elif parallel.zero_stage == 2 and is_too_large:
        copy = bucket + element * _reduced_together(recipe, stage, shards)
        # A rank adds its elements of the sum to its gradients in float32.
        if element < FLOAT32:
            copy += FLOAT32 * min(weight, _trained_by_adamw(recipe, stage) // shards)
        freed = activations.final_norm_bytes(recipe, device)
    else:
        return Moment()
    if activations.sums_tied_gradients(recipe):
        freed = activations.embedding_freed(recipe, stage, microbatches, device)
    is_offloaded = recipe.training.offload_activations
    return Moment(element * weight + copy + hidden, 0 if is_offloaded else freed)


def _reduced_together(recipe: Recipe, stage: int, shards: int) -> int:
    """Return the largest part of the output layer's gradient that ZeRO 2 copies, in elements.

    DeepSpeed splits a gradient at the boundaries of the ranks' partitions. It collects consecutive
    pieces until they exceed REDUCE_BUCKET, and copies them into one tensor
    (``allreduce_and_scatter`` in runtime/zero/stage_1_and_2.py). A piece that exceeds REDUCE_BUCKET
    alone is not copied.
    """
    weight, matrices = activations.output_weight(recipe), _trained_by_adamw(recipe, stage)
    piece = -(-matrices // shards)
    first = piece - (matrices - weight) % piece
    with_first = max(0, REDUCE_BUCKET - first) // piece + (first <= REDUCE_BUCKET)
    without_first = REDUCE_BUCKET // piece + 1
    copies = [first + with_first * piece] * (with_first > 0)
    copies += [without_first * piece] * (without_first > 1)
    return min(weight, max(copies, default=0))


def _trained_by_adamw(recipe: Recipe, stage: int) -> int:
    """Return a rank's number of trained parameters in the group of the output layer's weight."""
    return trained_parameters(recipe, stage)[0] - muon.muon_elements(recipe, stage)


def largest_trained(recipe: Recipe, stage: int) -> int:
    """Return the number of elements of a stage's largest trained parameter on a rank.

    If everything is trained, return the embedding's number, also for a stage without embedding.
    """
    if trains_everything(recipe):
        return activations.vocabulary_elements(recipe)
    return max(
        tensor.elements(recipe.parallel.tensor)
        for tensor in stage_tensors(recipe, stage)
        if trained_parts(tensor, recipe)
    )


def rank_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Return a rank's numbers of parameters: (in the run's precision, always in float32)."""
    size = recipe.parallel.tensor
    counts = [0, 0]
    for tensor in stage_outer_tensors(recipe, stage):
        counts[tensor.float32] += tensor.elements(size)
    for kind, layers in stage_kinds(recipe, stage):
        for tensor in layer_tensors(recipe.model, kind):
            counts[tensor.float32] += layers * tensor.elements(size)
    return counts[0], counts[1]


def trained_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Return the numbers of :func:`rank_parameters` without fully frozen parameters."""
    if trains_everything(recipe):
        return rank_parameters(recipe, stage)
    counts = [0, 0]
    for tensor in stage_tensors(recipe, stage):
        if trained_parts(tensor, recipe):
            counts[tensor.float32] += tensor.elements(recipe.parallel.tensor)
    return counts[0], counts[1]
