"""Estimate of the activations kept for the backward pass, and of a layer's temporary memory.

The values depend on ``device``: on a ``gpu`` norms and SwiGLU are fused; on a ``cpu`` torch keeps
their intermediate results too, and differential attention is computed in blocks of rows. The
variant counts what its attention keeps. A frozen projection keeps its input only for LoRA. LoRA's
narrow inputs are not added, and the input of a frozen output projection is not subtracted, because
attention kernels keep it as their result.
"""

from typing import Literal

from diffmegatron.attention.kernels.registry import BACKENDS
from diffmegatron.attention.variants.base import ContextCommunication, Kernels, Variant
from diffmegatron.config.attention_backend import planned_backend
from diffmegatron.config.divisibility import context_communication as chosen_communication
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import EMBEDDING, LORA_A, OUTPUT, network_tensors, stage_kinds
from diffmegatron.config.trainable_patterns import trained_parts, trains_everything

Device = Literal["gpu", "cpu"]
BYTES = {"bf16": 2, "fp32": 4}
FLOAT32 = 4


def stage_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes that a pipeline stage's layers keep for all microbatches in flight."""
    parallel = recipe.parallel
    in_flight = virtual_stages_in_flight(recipe, stage, microbatches)
    kept = in_flight * virtual_stage_bytes(recipe, stage, device) + shared_bytes(recipe)
    sharded = _hidden_bytes(recipe) * local_tokens(recipe)
    if stage == 0 and not _is_trained(recipe, EMBEDDING):
        # No gradient leads to the first layer's input, so that nothing keeps it.
        kept -= sharded
    if stage == parallel.pipeline - 1:
        # Add the inputs of the final norm and the output layer for one microbatch.
        kept += final_norm_bytes(recipe, device)
        exchanged = in_flight - 1
    else:
        # Add the gradient that has arrived; interleaved, the next input has arrived as well.
        exchanged = in_flight + (1 if parallel.virtual_pipeline == 1 else 2)
    # Megatron-core keeps the sent hidden states until their gradient arrives.
    return round(kept + exchanged * sharded)


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


def layer_backward(recipe: Recipe, stage: int, device: Device) -> tuple[int, int]:
    """Return the temporary memory of one layer's backward pass, at the larger of two moments.

    At SwiGLU these are the gradients of its output and of its inputs. The product that the
    projection after it has kept is freed. At the first projection, before it in the network, these
    are the gradients of its output, its weight and its input. All that SwiGLU has kept is freed. At
    both there is the gradient of the residual stream, and a recomputed layer has run again. A tied
    embedding's gradient from the output layer waits for the one from the embedding.

    Returns:
        Bytes beside the kept activations, and bytes of the kept activations that are freed.
    """
    model, parallel = recipe.model, recipe.parallel
    element, tokens = BYTES[recipe.training.precision], local_tokens(recipe)
    ffn = model.ffn_hidden_size / parallel.tensor
    shards = parallel.tensor if parallel.sequence_parallel else 1
    # Interleaved stages of one layer copy the gradient that they receive. The first stage of a
    # pipeline has received the gradient too, where the activations count it.
    virtual_stages = parallel.pipeline * parallel.virtual_pipeline
    is_copied = parallel.virtual_pipeline > 1 and model.num_layers == virtual_stages
    streams = (stage > 0 or parallel.pipeline == 1) + is_copied
    again = _recomputed_bytes(recipe, device) + _offloaded_bytes(recipe, device)
    if sums_tied_gradients(recipe):
        again += element * output_weight(recipe)
    again += tokens * streams * _hidden_bytes(recipe)

    # Sequence-parallel ranks sum the gradient of the projection's input into a further tensor.
    states = 2 * ffn + model.hidden_size + (model.hidden_size / shards if shards > 1 else 0)
    weight = 2 * ffn * model.hidden_size if _is_trained(recipe, "mlp.linear_fc1.weight") else 0
    projection = element * (tokens * states + weight), _swiglu_bytes(recipe, device)
    product = element * tokens * ffn
    freed_product = product if _keeps_input(recipe, "mlp.linear_fc2") else 0
    is_fused = device == "gpu"
    moments = [projection, (3 * product, freed_product)] if is_fused else [projection]
    beside, freed = max(moments, key=lambda each: each[0] - each[1])
    if recipe.recompute.granularity == "full" or recipe.training.offload_activations:
        again, freed = again - freed, 0
    # On a CPU what unfused operations hold for a moment is about as large and not counted.
    if is_fused and stage == parallel.pipeline - 1 and not recipe.training.offload_activations:
        freed += final_norm_bytes(recipe, device)
    return round(beside + again), round(freed)


def _swiglu_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes that SwiGLU and the projection after it keep of a microbatch.

    They are gate and up projection and their product; unfused also its two factors.
    """
    factors = 2 if device == "gpu" else 4
    factors += _keeps_input(recipe, "mlp.linear_fc2")
    element, ffn = BYTES[recipe.training.precision], recipe.model.ffn_hidden_size
    return local_tokens(recipe) * factors * element * ffn / recipe.parallel.tensor


def logits_bytes(recipe: Recipe, device: Device) -> int:
    """Return the bytes at the loss: the logits, or the gradient of the output layer.

    On a GPU the cross-entropy overwrites the logits with their gradient. On a CPU Megatron-core's
    cross-entropy overwrites them with float32 probabilities; bf16 logits stay beside these. Later
    the backward pass holds the gradients of the logits, of the output layer's weight and of the
    hidden states. If the loss is computed in chunks of tokens, one chunk has logits at a time, and
    the weight gradients of the chunks are added up in a tensor of their own. Sequence-parallel
    ranks sum the gradient of the hidden states into a further tensor, and a pipeline holds one
    more. If activations are offloaded, the output layer's input has returned from the host.
    """
    model, training, parallel = recipe.model, recipe.training, recipe.parallel
    element, tokens = BYTES[training.precision], local_tokens(recipe)
    chunk = min(tokens, training.loss_chunk or tokens)
    vocabulary = model.vocab_size / parallel.tensor
    per_logit = element
    if device == "cpu" and training.precision == "bf16":
        per_logit += FLOAT32
    sharded = _hidden_bytes(recipe) * tokens
    hidden_gradient: float = element * model.hidden_size * chunk
    if parallel.sequence_parallel or chunk < tokens:
        hidden_gradient += sharded
    gradients = 2 if chunk < tokens else 1
    backward = element * (chunk * vocabulary + gradients * output_weight(recipe)) + hidden_gradient
    if training.offload_activations or parallel.pipeline > 1:
        backward += sharded
    return round(max(per_logit * chunk * vocabulary, backward))


def output_weight(recipe: Recipe) -> int:
    """Return the elements of the output layer's weight on a tensor rank; 0 if it is frozen."""
    model = recipe.model
    if not _is_trained(recipe, EMBEDDING if model.tied_embeddings else OUTPUT):
        return 0
    return model.vocab_size * model.hidden_size // recipe.parallel.tensor


def final_hidden_bytes(recipe: Recipe) -> int:
    """Return the bytes of the hidden states after the last layer, or of their gradient."""
    return round(_hidden_bytes(recipe) * local_tokens(recipe))


def final_norm_bytes(recipe: Recipe, device: Device) -> int:
    """Return the bytes that the final norm and the output layer keep of a microbatch."""
    return round(local_tokens(recipe) * _norm_and_projection_input(recipe, device))


def _is_trained(recipe: Recipe, name: str) -> bool:
    """Return whether a tensor has a gradient.

    Args:
        recipe: recipe of the run.
        name: name of the tensor; without the prefix ``decoder.layers.N.`` one of any layer.
    """
    return trains_everything(recipe) or any(
        f".{each.name}".endswith(f".{name}") and trained_parts(each, recipe)
        for each in network_tensors(recipe.model)
    )


def _keeps_input(recipe: Recipe, projection: str) -> bool:
    """Return whether the layers' projections of this name need their input in the backward pass.

    They need it for the gradient of their weight, or of LoRA's matrix beside it.
    """
    return _is_trained(recipe, f"{projection}.weight") or _is_trained(
        recipe, f"{projection}.{LORA_A}"
    )


def embedding_backward(recipe: Recipe, stage: int) -> int:
    """Return the bytes beside the activations while the embedding's backward pass runs.

    They are the gradients of its weight and of its output, which sequence-parallel ranks gather
    from another tensor. A tied embedding has two gradients of its weight without a pipeline. Only
    the first stage of a pipeline holds activations of other microbatches at that time. This
    microbatch's activations are freed (:func:`embedding_freed`). An untied embedding without a
    pipeline needs less than the output layer and is not counted.
    """
    parallel, model = recipe.parallel, recipe.model
    if stage > 0 or not _is_trained(recipe, EMBEDDING):
        return 0
    if parallel.pipeline == 1 and not model.tied_embeddings:
        return 0
    element = BYTES[recipe.training.precision]
    weights = model.vocab_size * model.hidden_size // parallel.tensor
    if sums_tied_gradients(recipe):
        weights *= 2
    streams = model.hidden_size
    if parallel.sequence_parallel:
        streams += model.hidden_size // parallel.tensor
    return element * (weights + streams * local_tokens(recipe))


def embedding_freed(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes of the activations that are freed at :func:`embedding_backward`."""
    if recipe.training.offload_activations:
        return 0
    if recipe.parallel.pipeline > 1:
        return round(virtual_stage_bytes(recipe, stage, device))
    return stage_activations(recipe, stage, microbatches, device) - shared_bytes(recipe)


def sums_tied_gradients(recipe: Recipe) -> bool:
    """Return whether autograd sums the gradients of a tied embedding's two uses on each rank."""
    is_tied = recipe.model.tied_embeddings and recipe.parallel.pipeline == 1
    return is_tied and _is_trained(recipe, EMBEDDING)


def offloaded_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes of activations that are offloaded to host memory."""
    if not recipe.training.offload_activations:
        return 0
    return stage_activations(recipe, stage, microbatches, device) - shared_bytes(recipe)


def virtual_stage_bytes(recipe: Recipe, stage: int, device: Device) -> float:
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
    attention, core = attention_bytes_per_token(recipe, device, kind)
    if recomputed or recipe.recompute.granularity != "selective":
        attention += core
    norms = 2 * _norm_and_projection_input(recipe, device)
    for projection in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        if not _keeps_input(recipe, projection):
            norms -= _hidden_bytes(recipe)
    return local_tokens(recipe) * (norms + attention) + _swiglu_bytes(recipe, device)


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
    kernels = _kernels(recipe, device, kind)
    projected, core = (each / recipe.parallel.tensor for each in kind.kept_bytes(kernels))
    if kernels.has_mask and BACKENDS[kind.operation][kernels.backend].keeps_bias:
        core += kernels.element * kernels.keys
    return projected, core


def _kernels(recipe: Recipe, device: Device, kind: Variant) -> Kernels:
    communication = context_communication(recipe)
    has_documents = bool(recipe.data.reset_attention_mask)
    rows = recipe.training.micro_batch_size if has_documents else 1
    keys: float = rows * recipe.training.seq_length
    if communication == "all_gather":
        # A rank has a chunk from each half of the sequence, and attends up to its end.
        keys *= (2 * recipe.parallel.context + 1) / (4 * recipe.parallel.context)
    return Kernels(
        element=BYTES[recipe.training.precision],
        device=device,
        backend=planned_backend(recipe, kind, device),
        communication=communication,
        context=recipe.parallel.context,
        keys=keys,
        has_mask=has_documents or communication == "all_gather",
        recomputes_core=recipe.recompute.granularity == "selective",
    )


def context_communication(recipe: Recipe) -> ContextCommunication | None:
    """Return the communication of context-parallel ranks; None for one rank."""
    return None if recipe.parallel.context == 1 else chosen_communication(recipe)


def shared_bytes(recipe: Recipe) -> int:
    """Return the bytes that all layers and microbatches share.

    They are each virtual stage's angles of the rotary embedding, and with sequence parallelism the
    buffer into which Megatron-core gathers the hidden states of the tensor-parallel ranks.
    """
    parallel = recipe.parallel
    positions = recipe.training.seq_length // parallel.context
    shared = FLOAT32 * recipe.model.attention.head_dim * positions * parallel.virtual_pipeline
    if parallel.sequence_parallel:
        element = BYTES[recipe.training.precision]
        shared += element * recipe.model.hidden_size * local_tokens(recipe)
    return shared
