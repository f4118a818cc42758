"""Estimate of the activations kept for the backward pass, and of a layer's temporary memory.

The values depend on ``device``: on a ``gpu`` norms and SwiGLU are fused; on a ``cpu`` torch keeps
their intermediate results too, and differential attention is computed in blocks of rows. The
variant counts what its attention keeps. Inputs that a frozen projection does not keep are not
subtracted, and LoRA's narrow inputs are not added.
"""

from typing import Literal

from diffmegatron.attention.variants.base import ContextCommunication, Kernels, Variant
from diffmegatron.config.attention_backend import planned_backend
from diffmegatron.config.divisibility import context_communication as chosen_communication
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import stage_kinds

Device = Literal["gpu", "cpu"]
BYTES = {"bf16": 2, "fp32": 4}
FLOAT32 = 4


def stage_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes that a pipeline stage's layers keep for all microbatches in flight."""
    parallel = recipe.parallel
    kept = virtual_stages_in_flight(recipe, stage, microbatches) * _virtual_stage_bytes(
        recipe, stage, device
    )
    kept += _angle_bytes(recipe)
    if stage == parallel.pipeline - 1:
        # Add the inputs of the final norm and the output layer for one microbatch.
        return round(kept + local_tokens(recipe) * _norm_and_projection_input(recipe, device))
        # Megatron-core keeps the sent hidden states until their gradient arrives.
    sent = _hidden_bytes(recipe) * local_tokens(recipe)
    return round(kept + virtual_stages_in_flight(recipe, stage, microbatches) * sent)


def virtual_stages_in_flight(recipe: Recipe, stage: int, microbatches: int) -> int:
    """Return the maximum number of virtual-stage forward passes that await their backward pass.

    1F1B holds one microbatch for each stage from this one on. With interleaving, a rank runs ahead
    by two virtual stages per later rank, and by all its own but the last for a round of
    microbatches (Megatron-core's get_pp_rank_microbatches, pipeline_parallel/schedules.py).
    """
    size, stages = recipe.parallel.pipeline, recipe.parallel.virtual_pipeline
    if stages == 1:
        return min(microbatches, size - stage)
    ahead = 2 * (size - stage - 1) + (stages - 1) * size
    return min(microbatches * stages, ahead + 1)


def local_tokens(recipe: Recipe) -> int:
    """Return the number of a microbatch's tokens on one context-parallel rank."""
    training = recipe.training
    return training.micro_batch_size * training.seq_length // recipe.parallel.context


def layer_backward(recipe: Recipe, device: Device) -> int:
    """Return the temporary bytes of one layer's backward pass, in addition to the activations.

    They are the gradients of SwiGLU's projections and of the hidden state, one projection's weight
    gradient, and the activations of layers that are recomputed.
    """
    model, parallel = recipe.model, recipe.parallel
    element = BYTES[recipe.training.precision]
    ffn = model.ffn_hidden_size / parallel.tensor
    hidden_states = element * (2 * ffn + 2 * model.hidden_size)
    weight_gradient = element * 2 * ffn * model.hidden_size
    again = _recomputed_bytes(recipe, device) + _offloaded_bytes(recipe, device)
    return round(local_tokens(recipe) * hidden_states + weight_gradient + again)


def logits_bytes(recipe: Recipe, device: Device) -> int:
    """Return the bytes at the loss: logits of a chunk, or the output layer's gradients.

    On a GPU the cross-entropy overwrites the logits with their gradient. On a CPU Megatron-core's
    makes float32 probabilities, in bf16 in addition to the logits. In the backward pass the weight
    gradient of the output layer is held together with the gradient of the logits.
    """
    model, training = recipe.model, recipe.training
    element = BYTES[training.precision]
    tokens = min(local_tokens(recipe), training.loss_chunk or local_tokens(recipe))
    vocabulary = model.vocab_size / recipe.parallel.tensor
    per_logit = element
    if device == "cpu" and training.precision == "bf16":
        per_logit += FLOAT32
    hidden_state = element * model.hidden_size * tokens
    weight_gradient = element * vocabulary * model.hidden_size
    backward = element * tokens * vocabulary + weight_gradient + hidden_state
    return round(max(per_logit * tokens * vocabulary, backward))


def offloaded_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes of activations that are offloaded to host memory."""
    if not recipe.training.offload_activations:
        return 0
    return stage_activations(recipe, stage, microbatches, device)


def _virtual_stage_bytes(recipe: Recipe, stage: int, device: Device) -> float:
    """Return the bytes that a virtual stage keeps of one microbatch, with its recomputation.

    With several kinds of attention this uses the mean over the pipeline stage's layers.
    """
    recompute, kinds = recipe.recompute, stage_kinds(recipe, stage)
    count = sum(count for _, count in kinds)
    layers = count // recipe.parallel.virtual_pipeline
    whole = sum(count * _layer_bytes(recipe, device, kind) for kind, count in kinds) / count
    # Megatron-core keeps a recomputed layer's input, which sequence parallelism shards.
    entrance = _hidden_bytes(recipe) * local_tokens(recipe)
    if recompute.granularity != "full":
        return layers * whole
    if recompute.method == "uniform":
        return -(-layers // recompute.layers) * entrance
    return recompute.layers * entrance + (layers - recompute.layers) * whole


def _recomputed_bytes(recipe: Recipe, device: Device) -> float:
    """Return the temporary bytes of the layers that are recomputed together."""
    recompute = recipe.recompute
    if recompute.granularity == "none":
        return 0
    if recompute.granularity == "selective":
        cores = (attention_bytes_per_token(recipe, device, kind)[1] for kind in _kinds(recipe))
        return local_tokens(recipe) * max(cores)
    together = recompute.layers if recompute.method == "uniform" else 1
    layers = (_layer_bytes(recipe, device, kind, recomputed=True) for kind in _kinds(recipe))
    return together * max(layers)


def _kinds(recipe: Recipe) -> list[Variant]:
    return [kind for kind, _ in recipe.model.attention.by_kind(recipe.model.num_layers)]


def _offloaded_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes of one layer's activations on their way to or from host memory."""
    if not recipe.training.offload_activations:
        return 0
    return max(_layer_bytes(recipe, device, kind) for kind in _kinds(recipe))


def _layer_bytes(
    recipe: Recipe, device: Device, kind: Variant, *, recomputed: bool = False
) -> float:
    """Return the bytes that one layer keeps of a microbatch: norms, projections, attention, SwiGLU.

    Args:
        recipe: recipe of the run.
        device: device of the layer's operations.
        kind: kind of attention of the layer.
        recomputed: whether the layer is being recomputed, and thus keeps everything.
    """
    element, tensor = BYTES[recipe.training.precision], recipe.parallel.tensor
    # SwiGLU keeps gate and up projection, fc2 keeps its input; unfused SwiGLU keeps its factors.
    factors = 3 if device == "gpu" else 5
    mlp = factors * element * recipe.model.ffn_hidden_size / tensor
    attention, core = attention_bytes_per_token(recipe, device, kind)
    if recomputed or recipe.recompute.granularity != "selective":
        attention += core
    norms = 2 * _norm_and_projection_input(recipe, device)
    return local_tokens(recipe) * (norms + attention + mlp)


def _hidden_bytes(recipe: Recipe) -> float:
    """Return the bytes of one token's residual stream, which sequence parallelism shards."""
    shards = recipe.parallel.tensor if recipe.parallel.sequence_parallel else 1
    return BYTES[recipe.training.precision] * recipe.model.hidden_size / shards


def _norm_and_projection_input(recipe: Recipe, device: Device) -> float:
    """Return the bytes per token that RMSNorm and the projection after it keep.

    A fused RMSNorm keeps its input and one float32 per token, and the projection keeps its own
    input. Sequence parallelism shards both, because Megatron-core gathers the sequence again in the
    backward pass. An unfused norm keeps the normalized input in float32; in bf16 it also keeps its
    input in float32 instead of bf16.
    """
    shards = recipe.parallel.tensor if recipe.parallel.sequence_parallel else 1
    per_token = 2 * _hidden_bytes(recipe) + FLOAT32 / shards
    if device == "cpu":
        hidden = recipe.model.hidden_size / shards
        is_bf16 = recipe.training.precision == "bf16"
        per_token += (2 * FLOAT32 - BYTES["bf16"] if is_bf16 else FLOAT32) * hidden
    return per_token


def attention_bytes_per_token(recipe: Recipe, device: Device, kind: Variant) -> tuple[float, float]:
    """Return the bytes per token that a rank keeps of a layer's attention.

    Returns:
        Bytes of q, k, v and the output projection's input, and bytes of the core attention.
    """
    kernels = Kernels(
        element=BYTES[recipe.training.precision],
        device=device,
        backend=planned_backend(recipe, kind, device),
        communication=context_communication(recipe),
        context=recipe.parallel.context,
        keys=recipe.training.seq_length,
    )
    projected, core = kind.kept_bytes(kernels)
    return projected / recipe.parallel.tensor, core / recipe.parallel.tensor


def context_communication(recipe: Recipe) -> ContextCommunication | None:
    """Return the communication of context-parallel ranks; None for one rank."""
    return None if recipe.parallel.context == 1 else chosen_communication(recipe)


def _angle_bytes(recipe: Recipe) -> float:
    """Return the bytes of rotary angles, which all layers and microbatches share."""
    positions = recipe.training.seq_length / recipe.parallel.context
    return FLOAT32 * recipe.model.attention.head_dim * positions
