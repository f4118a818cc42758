"""Estimate of the time of a training step by a roofline model."""

from dataclasses import dataclass
from typing import NamedTuple

from diffmegatron.attention.costs import costs_of
from diffmegatron.attention.kernels.registry import BACKENDS
from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.config.attention_backend import planned_backend
from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting import muon
from diffmegatron.model.accounting.activations import (
    BYTES,
    FLOAT32,
    attention_bytes_per_token,
    context_communication,
    local_tokens,
)
from diffmegatron.model.accounting.flops import (
    count_flops,
    frozen_matrices,
)
from diffmegatron.model.accounting.hardware import Accelerator
from diffmegatron.model.accounting.memory import REDUCE_BUCKET, largest_trained, trained_parameters
from diffmegatron.model.accounting.mfu import model_flops_utilization
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.plan.traffic import (
    attention_passes,
    busiest_stage,
    forward_passes,
    stage_collectives,
    stage_traffic,
)

# Assumed number of GPUs in a node.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Assumptions:
    """Assumed efficiencies, bandwidths and latency, which data sheets do not contain.

    Attributes:
        matmul: fraction of peak FLOP/s that matrix products reach.
        attention: fraction of peak FLOP/s that attention kernels reach.
        memory: fraction of memory bandwidth that element-wise operations and the optimizer reach.
        network: bandwidth between nodes in bytes/s per GPU and direction (400 Gb/s).
        links: fraction of the bandwidth, within and between nodes, that collectives reach.
        latency: seconds that each collective takes in addition to the time of its bytes.
        host: bandwidth of host memory in bytes/s per GPU.
    """

    matmul: float = 0.6
    attention: float = 0.4
    memory: float = 0.8
    network: float = 50e9
    links: float = 0.7
    latency: float = 20e-6
    host: float = 25e9

    def sentences(self, recipe: Recipe, hardware: str, gpu: Accelerator) -> tuple[str, ...]:
        """Return the assumptions in words; most first runs do not reach the optimistic ones."""
        return (
            f"FLOP/s: bf16, {gpu.peak_flops / 1e12:,.0f} TFLOP/s dense peak of {hardware}; matrix "
            f"products reach {self.matmul:.0%}, attention {self.attention:.0%} (optimistic)",
            *(_attention_in_words(recipe, kind) for kind, _ in counted_kinds(recipe.model)),
            "MFU: model FLOPs over that peak; recomputation takes time but does not count",
            f"memory: {self.memory:.0%} of its bandwidth; {self.host / 1e9:g} GB/s to the host",
            f"network: nodes of {GPUS_PER_NODE}, {self.network / 1e9:g} GB/s per GPU between them; "
            f"collectives reach {self.links:.0%} of links and network (optimistic)",
            f"latency: {1e6 * self.latency:g} µs for each collective or message of a pipeline",
            "overlap: ring attention's communication with attention, and without pipeline the sum "
            "of ZeRO 1's gradients with the last microbatch's backward pass",
            "data loading, checkpoints and stragglers take no time (optimistic)",
        )


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated time of a step and its parts, in seconds unless stated otherwise.

    Attributes:
        compute: computation on the slowest stage, including recomputation.
        communication: communication that does not overlap with computation.
        idle: wait of a rank in the pipeline's bubble.
        optimizer: update of the optimizer.
        collectives: number of collectives per step on a rank of the stage that sends most.
        bubble: ``idle`` divided by the time in which the rank runs its microbatches.
        utilization: model FLOPs utilization (MFU), from 0 to 1.
        tokens_per_second: tokens per second over all ranks.
        days: duration of the run in days.
    """

    hardware: str
    compute: float
    communication: float
    idle: float
    optimizer: float
    collectives: int
    bubble: float
    utilization: float
    tokens_per_second: float
    days: float

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.compute + self.communication + self.idle + self.optimizer


def estimate_time(
    recipe: Recipe,
    world_size: int,
    hardware: str,
    accelerator: Accelerator,
    assumed: Assumptions,
) -> TimeEstimate:
    """Return the estimated time of a recipe on ``world_size`` GPUs."""
    microbatches = recipe.num_microbatches(world_size)
    each = _compute(recipe, accelerator, assumed)
    compute = each.total * microbatches
    stage = busiest_stage(recipe, world_size)
    in_pipeline, at_the_end = _communication(recipe, world_size, stage, accelerator, assumed, each)
    bubble = bubble_share(recipe, microbatches)
    idle = bubble * (compute + in_pipeline)
    optimizer = optimizer_seconds(recipe, world_size, accelerator, assumed)
    step = compute + in_pipeline + idle + at_the_end + optimizer
    training = recipe.training
    tokens_per_second = training.tokens_per_step / step
    flops = count_flops(recipe.model, training.seq_length, frozen_matrices(recipe)).training
    return TimeEstimate(
        hardware=hardware,
        compute=compute,
        communication=in_pipeline + at_the_end,
        idle=idle,
        optimizer=optimizer,
        collectives=stage_collectives(recipe, world_size, stage).total,
        bubble=bubble,
        utilization=model_flops_utilization(tokens_per_second, flops, world_size, accelerator),
        tokens_per_second=tokens_per_second,
        days=training.total_steps * step / 86_400,
    )


def bubble_share(recipe: Recipe, microbatches: int) -> float:
    """Return a rank's idle time in the pipeline's bubble divided by its working time.

    It is (p - 1) / (m * v) with p stages, m microbatches and v virtual stages per rank (Narayanan
    et al., 2021, arXiv 2104.04473).
    """
    parallel = recipe.parallel
    return (parallel.pipeline - 1) / (microbatches * parallel.virtual_pipeline)


class Compute(NamedTuple):
    """Seconds of computation for one microbatch on the slowest stage.

    Attributes:
        total: forward and backward pass.
        backward: part of ``total`` in the backward pass, including recomputation.
        attention: part of ``total`` in attention kernels.
    """

    total: float
    backward: float
    attention: float


def _compute(recipe: Recipe, gpu: Accelerator, assumed: Assumptions) -> Compute:
    """Return the seconds of computation for one microbatch on the stage with the output layer."""
    model, training, parallel = recipe.model, recipe.training, recipe.parallel
    tokens = local_tokens(recipe) / parallel.tensor
    passes = forward_passes(recipe)
    layers = model.num_layers / parallel.pipeline
    layer_weights = (count_flops(model, 0).forward / 2 - _vocabulary(recipe)) / model.num_layers
    # With training.loss_chunk, the backward pass computes the logits again.
    output_passes = 4 if training.loss_chunk else 3
    matmul = 2 * tokens * layers * layer_weights * (passes + 2)
    matmul += 2 * tokens * _vocabulary(recipe) * output_passes
    matmul -= 2 * tokens * frozen_matrices(recipe) / parallel.pipeline
    once, backward = _attention_work(recipe)
    pair = 2 * tokens * layers * training.seq_length / 2 / (assumed.attention * gpu.peak_flops)
    attention = pair * (attention_passes(recipe) * once + backward)
    elementwise = elementwise_bytes(recipe) / (assumed.memory * gpu.memory_bandwidth)
    total = matmul / (assumed.matmul * gpu.peak_flops) + attention + elementwise
    weights = layers * layer_weights + _vocabulary(recipe)
    forward = 2 * tokens * weights / (assumed.matmul * gpu.peak_flops)
    forward += pair * once + elementwise / (passes + 1)
    return Compute(total, total - forward, attention)


def _attention_work(recipe: Recipe) -> tuple[float, float]:
    """Return (forward, backward) multiply-adds per visible pair of query and key.

    Both are summed over the heads of a layer, and averaged over the layers. A causal mask hides
    about half of all pairs, so a backend that also computes hidden pairs needs twice as many.
    """
    forward = backward = 0.0
    for kind, count in counted_kinds(recipe.model):
        name = planned_backend(recipe, kind)
        share = count / recipe.model.num_layers
        if BACKENDS[kind.operation][name].computes_hidden_pairs:
            share *= 2
        once, back = costs_of(kind).work(name, deterministic=recipe.training.deterministic)
        forward, backward = forward + share * once, backward + share * back
    return forward, backward


def _attention_in_words(recipe: Recipe, kind: AttentionKind) -> str:
    name = planned_backend(recipe, kind)
    channels = kind.num_heads * kind.head_dim
    work = costs_of(kind).work(name, deterministic=recipe.training.deterministic)
    forward, backward = (f"{each / channels:.3g}d" for each in work)
    reason = ""
    if recipe.training.attention_backend == "auto":
        reason = ", which auto chooses without FlashAttention's libraries"
    hidden = BACKENDS[kind.operation][name].computes_hidden_pairs
    pairs = "pair, hidden ones too," if hidden else "visible pair"
    return (
        f"attention {kind.kind}: backend {name}{reason}; multiply-adds per {pairs} and head: "
        f"{forward} forward, {backward} backward"
    )


def _vocabulary(recipe: Recipe) -> int:
    return recipe.model.vocab_size * recipe.model.hidden_size


def elementwise_bytes(recipe: Recipe) -> float:
    """Return the bytes of element-wise operations on a rank of the last stage, per microbatch.

    Each pass of a layer moves the residual stream about 12 times, SwiGLU's three tensors once, and
    the tensors that core attention saves once. The loss makes three passes over the logits, or four
    with ``training.loss_chunk``.
    """
    model, parallel = recipe.model, recipe.parallel
    element, tokens = BYTES[recipe.training.precision], local_tokens(recipe)
    shards = parallel.tensor if parallel.sequence_parallel else 1
    stream = 12 * model.hidden_size / shards
    swiglu = 3 * model.ffn_hidden_size / parallel.tensor
    layers = model.num_layers / parallel.pipeline
    passes = 4 if recipe.training.loss_chunk else 3
    logits = passes * element * tokens * model.vocab_size / parallel.tensor
    kept = sum(
        count * attention_bytes_per_token(recipe, "gpu", kind)[1]
        for kind, count in counted_kinds(model)
    )
    per_layer = element * (stream + swiglu) + kept / model.num_layers
    return tokens * layers * (forward_passes(recipe) + 1) * per_layer + logits


def _communication(
    recipe: Recipe,
    world_size: int,
    stage: int,
    gpu: Accelerator,
    assumed: Assumptions,
    compute: Compute,
) -> tuple[float, float]:
    """Return the time of communication that does not overlap with computation, as two values.

    Ring attention's messages overlap with attention kernels. With ``parallel.overlaps_gradients``,
    the reduction of all gradients except the last bucket overlaps with the last microbatch's
    backward pass. Megatron numbers ranks in the order tensor, context, data, pipeline. The groups
    of one dimension span nodes if the product of the sizes up to and including that dimension
    exceeds the GPUs of a node.

    Returns:
        Seconds per step for tensor, context and pipeline parallelism, and seconds for ZeRO and
        Muon.
    """
    parallel, traffic = recipe.parallel, stage_traffic(recipe, world_size, stage)
    calls = stage_collectives(recipe, world_size, stage)
    inner = parallel.tensor * parallel.context
    data = inner * recipe.data_parallel(world_size)

    def seconds(kind: str, span: int) -> float:
        rate = gpu.link_bandwidth if span <= GPUS_PER_NODE else assumed.network
        sending = getattr(traffic, kind) / (assumed.links * rate)
        return sending + getattr(calls, kind) * assumed.latency

    communication = seconds("context", inner)
    if context_communication(recipe) == "ring":
        attention = compute.attention * recipe.num_microbatches(world_size)
        communication = max(0.0, communication - attention)
    gradients = seconds("gradients", data)
    if parallel.overlaps_gradients:
        gradients = max(gradients - compute.backward, gradients * _last_share(recipe))
    zero = gradients + seconds("weights", data) + seconds("muon", data)
    in_pipeline = seconds("tensor", parallel.tensor) + communication
    return in_pipeline + seconds("pipeline", world_size), zero


def _last_share(recipe: Recipe) -> float:
    """Return the last bucket's fraction of all gradients; its reduction cannot overlap."""
    trained = sum(trained_parameters(recipe, 0))
    return min(1.0, max(REDUCE_BUCKET, largest_trained(recipe, 0)) / trained)


def optimizer_seconds(
    recipe: Recipe, world_size: int, gpu: Accelerator, assumed: Assumptions
) -> float:
    """Return the seconds of the optimizer's update on the slowest pipeline stage.

    Device or host bandwidth limits the update, and the FLOP/s limit Muon's matrix products.
    """
    return max(
        _stage_update(recipe, world_size, stage, gpu, assumed)
        for stage in range(recipe.parallel.pipeline)
    )


def _stage_update(
    recipe: Recipe, world_size: int, stage: int, gpu: Accelerator, assumed: Assumptions
) -> float:
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    partition = sum(trained_parameters(recipe, stage)) / shards
    # Master weights and two moments are read and written once. Gradients are read three times.
    # Muon has one moment fewer, and writes its update over the gradient.
    states = FLOAT32 * (9 * partition - muon.muon_elements(recipe, stage) / shards)
    products = 2 * muon.operations_in_sequence(recipe, world_size, stage)
    orthogonalized = products / (assumed.matmul * gpu.peak_flops)
    if recipe.parallel.offload_optimizer:
        moved = 2 * BYTES[recipe.training.precision] * partition
        return (states + moved) / assumed.host + orthogonalized
    return states / (assumed.memory * gpu.memory_bandwidth) + orthogonalized
