"""Estimate of the time of a training step by a roofline model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from diffmegatron.attention.costs import costs_of
from diffmegatron.attention.kernels.registry import known_backend
from diffmegatron.config.attention_backend import planned_backend
from diffmegatron.config.fp8_products import fp8_layers
from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting import muon
from diffmegatron.model.accounting.activations import (
    BYTES,
    FLOAT32,
    FP8,
    attention_bytes_per_token,
    context_communication,
    local_tokens,
)
from diffmegatron.model.accounting.flops import (
    count_flops,
    frozen_matrices,
)
from diffmegatron.model.accounting.hardware import GPUS_PER_NODE, Accelerator
from diffmegatron.model.accounting.memory import REDUCE_BUCKET, largest_trained, trained_parameters
from diffmegatron.model.accounting.mfu import model_flops_utilization
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.plan.rates import FP8_SPEED, Hardware, Rates, origin
from diffmegatron.plan.traffic import (
    attention_passes,
    busiest_stage,
    forward_passes,
    stage_collectives,
    stage_traffic,
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
        origins: "measured", "assumed" or "measured in part" for the rates behind each part of the
            step: compute, communication, idle, optimizer and step.
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
    origins: Mapping[str, str]

    @property
    def step(self) -> float:
        """Seconds per step."""
        return self.compute + self.communication + self.idle + self.optimizer


def estimate_time(recipe: Recipe, world_size: int, hardware: Hardware) -> TimeEstimate:
    """Return the estimated time of a recipe on ``world_size`` GPUs."""
    microbatches = recipe.num_microbatches(world_size)
    each = _compute(recipe, hardware)
    compute = each.total * microbatches
    stage = busiest_stage(recipe, world_size)
    in_pipeline, at_the_end = _communication(recipe, world_size, stage, hardware, each)
    bubble = bubble_share(recipe, microbatches)
    idle = bubble * (compute + in_pipeline)
    optimizer = optimizer_seconds(recipe, world_size, hardware.gpu, hardware.rates)
    step = compute + in_pipeline + idle + at_the_end + optimizer
    training = recipe.training
    tokens_per_second = training.tokens_per_step / step
    flops = count_flops(recipe.model, training.seq_length, frozen_matrices(recipe)).training
    return TimeEstimate(
        hardware=hardware.name,
        compute=compute,
        communication=in_pipeline + at_the_end,
        idle=idle,
        optimizer=optimizer,
        collectives=stage_collectives(recipe, world_size, stage).total,
        bubble=bubble,
        utilization=model_flops_utilization(tokens_per_second, flops, world_size, hardware.gpu),
        tokens_per_second=tokens_per_second,
        days=training.total_steps * step / 86_400,
        origins=_origins(recipe, world_size, hardware, communicates=in_pipeline + at_the_end > 0),
    )


def _origins(
    recipe: Recipe, world_size: int, hardware: Hardware, *, communicates: bool
) -> dict[str, str]:
    """Return :attr:`TimeEstimate.origins`."""
    kernels = [
        hardware.rates.of_attention(recipe, kind, planned_backend(recipe, kind), hardware.gpu)
        for kind, _ in counted_kinds(recipe.model)
    ]
    measured = set(hardware.rates.measured)
    if all(each.is_measured for each in kernels):
        measured.add("attention")
    compute, sending = {"matmul", "memory", "attention"}, set()
    if recipe.training.fp8 is not None:
        compute.add("fp8")
    if communicates:
        sending = {"links", "latency"} | ({"network"} if world_size > GPUS_PER_NODE else set())
    optimizer = {"host" if recipe.parallel.offload_optimizer else "memory"}
    if recipe.optimizer.kind == "muon":
        optimizer.add("matmul")
    used = {
        "compute": compute,
        "communication": sending,
        "idle": compute | sending if recipe.parallel.pipeline > 1 else set(),
        "optimizer": optimizer,
        "step": compute | sending | optimizer,
    }
    return {part: origin(names, measured) for part, names in used.items()}


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


def _compute(recipe: Recipe, hardware: Hardware) -> Compute:
    """Return the seconds of computation for one microbatch on the stage with the output layer."""
    gpu, rates = hardware.gpu, hardware.rates
    model, training, parallel = recipe.model, recipe.training, recipe.parallel
    tokens = local_tokens(recipe) / parallel.tensor
    passes = forward_passes(recipe)
    layers = model.num_layers / parallel.pipeline
    layer_weights = (count_flops(model, 0).forward / 2 - _vocabulary(recipe)) / model.num_layers
    # With training.loss_chunk, the backward pass computes the logits again.
    output_passes = 4 if training.loss_chunk else 3
    # Products in FP8 take the time of 1 / FP8_SPEED of their multiply-adds.
    fp8 = fp8_layers(recipe, parallel.pipeline - 1) / layers
    layer_weights *= 1 - fp8 + fp8 / FP8_SPEED
    matmul = 2 * tokens * layers * layer_weights * (passes + 2)
    matmul += 2 * tokens * _vocabulary(recipe) * output_passes
    matmul -= 2 * tokens * frozen_matrices(recipe) / parallel.pipeline
    once, backward = _attention_work(recipe, hardware)
    attention_flops = 2 * tokens * layers / gpu.peak_flops
    attention = attention_flops * (attention_passes(recipe) * once + backward)
    elementwise = elementwise_bytes(recipe) / (rates.memory * gpu.memory_bandwidth)
    total = matmul / (rates.matmul * gpu.peak_flops) + attention + elementwise
    weights = layers * layer_weights + _vocabulary(recipe)
    forward = 2 * tokens * weights / (rates.matmul * gpu.peak_flops)
    forward += attention_flops * once + elementwise / (passes + 1)
    return Compute(total, total - forward, attention)


def _attention_work(recipe: Recipe, hardware: Hardware) -> tuple[float, float]:
    """Return (forward, backward) multiply-adds per token, divided by the rates of the kernels.

    Both are summed over the visible keys and the heads of a layer, and averaged over the layers.
    Some backends also compute hidden keys.
    """
    forward = backward = 0.0
    for kind, count in counted_kinds(recipe.model):
        name = planned_backend(recipe, kind)
        rates = hardware.rates.of_attention(recipe, kind, name, hardware.gpu)
        costs, keys = costs_of(kind), float(recipe.training.seq_length)
        if not known_backend(kind.operation, name).computes_hidden_pairs:
            keys = costs.visible_keys(recipe.training.seq_length)
        keys *= count / recipe.model.num_layers
        once, back = costs.work(name, deterministic=recipe.training.deterministic)
        forward += keys * once / rates.forward
        backward += keys * back / rates.backward
    return forward, backward


def _vocabulary(recipe: Recipe) -> int:
    return recipe.model.vocab_size * recipe.model.hidden_size


def elementwise_bytes(recipe: Recipe) -> float:
    """Return the bytes of element-wise operations on a rank of the last stage, per microbatch.

    Each pass of a layer moves the residual stream about 12 times, SwiGLU's three tensors once, and
    the tensors that core attention saves once. The loss makes three passes over the logits, or four
    with ``training.loss_chunk``. In FP8, each input of a product and each gradient of its output is
    read and written twice as FP8 values.
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
    quantized = fp8_layers(recipe, parallel.pipeline - 1) * _quantized_bytes(recipe)
    moved = layers * (forward_passes(recipe) + 1) * per_layer + quantized
    return tokens * moved + logits


def _quantized_bytes(recipe: Recipe) -> float:
    """Return the bytes per token with which FP8 quantizes inputs and gradients in a layer."""
    model = recipe.model
    bytes_of_value = BYTES[recipe.training.precision] + 2 * FP8
    heads = [(kind.heads, count) for kind, count in counted_kinds(model)]
    outputs = sum(count * each.output_channels for each, count in heads) / model.num_layers
    fused = sum(count * each.qkv_channels for each, count in heads) / model.num_layers
    inputs = 2 * model.hidden_size + outputs + model.ffn_hidden_size
    gradients = 2 * model.hidden_size + fused + 2 * model.ffn_hidden_size
    channels = forward_passes(recipe) * inputs + gradients
    return bytes_of_value * channels / recipe.parallel.tensor


def _communication(
    recipe: Recipe,
    world_size: int,
    stage: int,
    hardware: Hardware,
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
    rates = hardware.rates
    within = rates.links * hardware.gpu.link_bandwidth
    between = rates.network_share * rates.network
    inner = parallel.tensor * parallel.context
    data = inner * recipe.data_parallel(world_size)

    def seconds(kind: str, span: int) -> float:
        rate = within if span <= GPUS_PER_NODE else between
        return getattr(traffic, kind) / rate + getattr(calls, kind) * rates.latency

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


def optimizer_seconds(recipe: Recipe, world_size: int, gpu: Accelerator, rates: Rates) -> float:
    """Return the seconds of the optimizer's update on the slowest pipeline stage.

    Device or host bandwidth limits the update, and the FLOP/s limit Muon's matrix products.
    """
    return max(
        _stage_update(recipe, world_size, stage, gpu, rates)
        for stage in range(recipe.parallel.pipeline)
    )


def _stage_update(
    recipe: Recipe, world_size: int, stage: int, gpu: Accelerator, rates: Rates
) -> float:
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    partition = sum(trained_parameters(recipe, stage)) / shards
    # Master weights and two moments are read and written once. Gradients are read three times.
    # Muon has one moment fewer, and writes its update over the gradient.
    states = FLOAT32 * (9 * partition - muon.muon_elements(recipe, stage) / shards)
    products = 2 * muon.operations_in_sequence(recipe, world_size, stage)
    orthogonalized = products / (rates.matmul * gpu.peak_flops)
    if recipe.parallel.offload_optimizer:
        moved = 2 * BYTES[recipe.training.precision] * partition
        return (states + moved) / rates.host + orthogonalized
    return states / (rates.memory * gpu.memory_bandwidth) + orthogonalized
