"""Estimate of activations saved for backward and of temporary memory, in bytes on one rank."""

from typing import Literal

from diffmegatron.attention.costs import LayerRun, costs_of
from diffmegatron.attention.kernels.costs import FLOAT32
from diffmegatron.attention.kernels.registry import ContextCommunication, known_backend
from diffmegatron.attention.kinds.kind import AttentionKind, reads_hidden
from diffmegatron.config.attention_backend import loss_shape, planned_backend
from diffmegatron.config.divisibility import choose_context_communication as chosen_communication
from diffmegatron.config.fp8_products import fp8_layers
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import EMBEDDING, INPUT_NORM, LORA_A, OUTPUT, stage_kinds
from diffmegatron.config.trainable_patterns import is_trained
from diffmegatron.model.accounting.parameters import counted_kinds

Device = Literal["gpu", "cpu"]
# Bytes per element for each value of training.precision.
BYTES = {"bf16": 2, "fp32": 4}
FP8 = 1


def stage_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return a stage's peak bytes per rank of saved activations and exchanged hidden states."""
    parallel = recipe.parallel
    in_flight = virtual_stages_in_flight(recipe, stage, microbatches)
    kept = in_flight * virtual_stage_bytes(recipe, stage, device) + shared_bytes(recipe)
    sharded = hidden_states_bytes(recipe)
    if stage == 0 and not (is_trained(recipe, EMBEDDING) or is_trained(recipe, INPUT_NORM)):
        # Embedding and input norm are frozen, so the first layer's input is not saved. Subtract it
        # for each microbatch in flight in the first virtual stage. With interleaving, a rank runs
        # ``parallel.pipeline`` microbatches through a virtual stage, then through the next one.
        rounds, rest = divmod(in_flight, parallel.pipeline * parallel.virtual_pipeline)
        kept -= (rounds * parallel.pipeline + min(rest, parallel.pipeline)) * sharded
    # ``exchanged`` counts tensors of hidden states for pipeline communication. Megatron-core keeps
    # sent hidden states until their gradient arrives.
    if stage == parallel.pipeline - 1:
        kept += final_norm_bytes(recipe, device)
        exchanged = in_flight - 1
    else:
        # Add the gradient received from the next stage. With interleaving, stages after the first
        # have also received the input of their next forward pass.
        exchanged = in_flight + (2 if parallel.virtual_pipeline > 1 and stage > 0 else 1)
    return round(kept + exchanged * sharded)


def virtual_stages_in_flight(recipe: Recipe, stage: int, microbatches: int) -> int:
    """Return the largest number of a rank's forward passes whose backward pass has not run yet.

    Source: ``get_pp_rank_microbatches`` in Megatron-core's pipeline_parallel/schedules.py.
    """
    size, stages = recipe.parallel.pipeline, recipe.parallel.virtual_pipeline
    if stages == 1:
        return min(microbatches, size - stage)
    ahead = 2 * (size - stage - 1) + (stages - 1) * size
    return min(microbatches * stages, ahead + 1)


def local_tokens(recipe: Recipe) -> int:
    """Return the number of tokens of a microbatch on one context-parallel rank."""
    training = recipe.training
    return training.micro_batch_size * training.seq_length // recipe.parallel.context


def layer_backward(recipe: Recipe, stage: int, device: Device) -> tuple[int, int]:
    """Return (temporary bytes, freed bytes of saved activations) in a layer's backward pass.

    Activations that are recomputed or copied from the host count as temporary bytes.
    """
    model, parallel = recipe.model, recipe.parallel
    element, tokens = BYTES[recipe.training.precision], local_tokens(recipe)
    ffn = model.ffn_hidden_size / parallel.tensor
    shards = _sequence_shards(recipe)
    # ``streams`` is the number of gradients of hidden states that stage_activations omits. The
    # last stage, which may be the only one, holds the gradient from the loss. A stage in the middle
    # holds the gradient that it sent last. With interleaving and one layer per virtual stage, a
    # test measured one more (tests/simulated_cuda).
    virtual_stages = parallel.pipeline * parallel.virtual_pipeline
    is_copied = parallel.virtual_pipeline > 1 and model.num_layers == virtual_stages
    streams = (stage > 0 or parallel.pipeline == 1) + is_copied
    again = _restored_bytes(recipe, device)
    if sums_tied_gradients(recipe):
        again += element * output_weight(recipe)
    again += tokens * streams * _hidden_bytes(recipe)

    # Under sequence parallelism, the gradient of fc1's input is reduce-scattered into a new tensor.
    states = 2 * ffn + model.hidden_size + (model.hidden_size / shards if shards > 1 else 0)
    weight = 2 * ffn * model.hidden_size if is_trained(recipe, "mlp.linear_fc1.weight") else 0
    projection = element * (tokens * states + weight), _swiglu_bytes(recipe, device)
    if recipe.training.fp8 is not None:
        # The gradient of fc1's output is quantized for two products.
        projection = projection[0] + 2 * FP8 * tokens * 2 * ffn, projection[1]
    product = element * tokens * ffn
    freed_product = product if _keeps_input(recipe, "mlp.linear_fc2") else 0
    is_fused = device == "gpu"
    moments = [projection, (3 * product, freed_product)] if is_fused else [projection]
    beside, freed = max(moments, key=lambda each: each[0] - each[1])
    if recipe.recompute.granularity == "full" or recipe.training.offload_activations:
        again, freed = again - freed, 0
    # When the backward pass of the last stage reaches its layers, the tensors that the final norm
    # and the output layer saved are already free. On a CPU, temporary results of unfused operations
    # use this memory.
    if is_fused and stage == parallel.pipeline - 1 and not recipe.training.offload_activations:
        freed += final_norm_bytes(recipe, device)
    return round(beside + again), round(freed)


def _swiglu_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes that SwiGLU and the projection after it (fc2) save for one microbatch."""
    factors = 2 if device == "gpu" else 4
    factors += _keeps_input(recipe, "mlp.linear_fc2")
    element, ffn = BYTES[recipe.training.precision], recipe.model.ffn_hidden_size
    return local_tokens(recipe) * factors * element * ffn / recipe.parallel.tensor


def logits_bytes(recipe: Recipe, device: Device) -> int:
    """Return the temporary bytes of the loss or, if larger, of the output layer's backward pass."""
    model, training, parallel = recipe.model, recipe.training, recipe.parallel
    element, chunk = BYTES[training.precision], loss_shape(recipe).length
    vocabulary = model.vocab_size / parallel.tensor
    per_logit = element
    if device == "cpu" and training.precision == "bf16":
        per_logit += FLOAT32
    sharded = hidden_states_bytes(recipe)
    hidden_gradient: float = element * model.hidden_size * chunk
    if training.loss_chunk is not None:
        # The chunks write their gradients into one tensor. Only sequence parallelism needs another
        # tensor, in which a chunk's gradient is before its reduction.
        hidden_gradient = sharded + (hidden_gradient if parallel.sequence_parallel else 0)
    elif parallel.sequence_parallel and output_weight(recipe) > 0:
        # Add the result of the reduction. If the output layer is frozen, the gradient of the logits
        # is freed before the reduction.
        hidden_gradient += sharded
    backward = element * (chunk * vocabulary + output_weight(recipe)) + hidden_gradient
    if training.offload_activations or parallel.pipeline > 1:
        # With offloading, add the output layer's input, copied from the host. With a pipeline, add
        # the gradient that this stage last sent to the previous stage.
        backward += sharded
    return round(max(per_logit * chunk * vocabulary, backward))


def loss_chunks(recipe: Recipe) -> int:
    """Return the number of chunks in which a context-parallel rank computes the loss."""
    training, shards = recipe.training, _sequence_shards(recipe)
    if training.loss_chunk is None:
        return 1
    positions = training.seq_length // recipe.parallel.context // shards
    return -(-positions // -(-training.loss_chunk // shards))


def output_weight(recipe: Recipe) -> int:
    """Return the number of elements of the output layer's weight on a rank; 0 if it is frozen."""
    if not is_trained(recipe, EMBEDDING if recipe.model.tied_embeddings else OUTPUT):
        return 0
    return vocabulary_elements(recipe)


def vocabulary_elements(recipe: Recipe) -> int:
    """Return the number of elements of the embedding or the output layer on a rank."""
    return recipe.model.vocab_size * recipe.model.hidden_size // recipe.parallel.tensor


def hidden_states_bytes(recipe: Recipe) -> float:
    """Return the bytes of a microbatch's hidden states on a rank."""
    return _hidden_bytes(recipe) * local_tokens(recipe)


def final_norm_bytes(recipe: Recipe, device: Device) -> int:
    """Return the bytes that the final norm and the output layer save for one microbatch."""
    return round(local_tokens(recipe) * _norm_and_projection_input(recipe, device))


def _keeps_input(recipe: Recipe, projection: str) -> bool:
    return is_trained(recipe, f"{projection}.weight") or is_trained(
        recipe, f"{projection}.{LORA_A}"
    )


def embedding_backward(recipe: Recipe, stage: int) -> int:
    """Return the temporary bytes of the embedding's backward pass; 0 if it cannot be the peak."""
    parallel, model = recipe.parallel, recipe.model
    if stage > 0 or not is_trained(recipe, EMBEDDING):
        return 0
    if parallel.pipeline == 1 and not model.tied_embeddings:
        return 0
    element = BYTES[recipe.training.precision]
    weights = vocabulary_elements(recipe)
    if sums_tied_gradients(recipe):
        weights *= 2
    streams = model.hidden_size
    if parallel.sequence_parallel:
        streams += model.hidden_size // parallel.tensor
    return element * (weights + streams * local_tokens(recipe))


def embedding_freed(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes of saved activations that are freed before the embedding's backward pass.

    Offloaded activations do not count, because they are not on the device.
    """
    if recipe.training.offload_activations:
        return 0
    if recipe.parallel.pipeline > 1:
        return round(virtual_stage_bytes(recipe, stage, device))
    return stage_activations(recipe, stage, microbatches, device) - shared_bytes(recipe)


def sums_tied_gradients(recipe: Recipe) -> bool:
    """Return whether the embedding and the output layer share a trained weight on the same rank."""
    is_tied = recipe.model.tied_embeddings and recipe.parallel.pipeline == 1
    return is_tied and is_trained(recipe, EMBEDDING)


def virtual_stage_bytes(recipe: Recipe, stage: int, device: Device) -> float:
    """Return the bytes that a virtual stage saves for one microbatch."""
    recompute, kinds = recipe.recompute, stage_kinds(recipe, stage)
    count = sum(count for _, count in kinds)
    layers = count // recipe.parallel.virtual_pipeline
    whole = sum(count * _layer_bytes(recipe, device, kind) for kind, count in kinds) / count
    whole -= _fp8_savings(recipe, stage)
    entrance = hidden_states_bytes(recipe)
    if recompute.granularity != "full":
        return layers * whole
    if recompute.method == "uniform":
        return -(-layers // recompute.layers) * entrance
    return recompute.layers * entrance + (layers - recompute.layers) * whole


def _fp8_savings(recipe: Recipe, stage: int) -> float:
    """Return the bytes by which FP8 inputs of products are smaller, in a stage's average layer."""
    kinds, tensor = stage_kinds(recipe, stage), recipe.parallel.tensor
    count = sum(count for _, count in kinds)
    smaller = BYTES[recipe.training.precision] - FP8
    hidden = recipe.model.hidden_size / _sequence_shards(recipe)
    saved = 0.0
    for kind, layers in kinds:
        channels = {
            "self_attention.linear_qkv": hidden,
            "self_attention.linear_proj": kind.heads.output_channels / tensor,
            "mlp.linear_fc1": hidden,
            "mlp.linear_fc2": recipe.model.ffn_hidden_size / tensor,
        }
        for name, inputs in channels.items():
            if not _keeps_input(recipe, name):
                continue
            # A kind that reads the hidden states also saves them in the run's precision.
            is_extra = name.endswith("linear_qkv") and reads_hidden(kind)
            saved += layers * (-FP8 if is_extra else smaller) * inputs
    return local_tokens(recipe) * saved / count * fp8_layers(recipe, stage) / count


def _restored_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes of activations that are recomputed or copied from the host together."""
    recompute = recipe.recompute
    kinds = [kind for kind, _ in counted_kinds(recipe.model)]
    layer = max(_layer_bytes(recipe, device, kind) for kind in kinds)
    restored = 0.0
    if recompute.granularity == "full":
        restored = (recompute.layers if recompute.method == "uniform" else 1) * layer
    elif recompute.granularity == "selective":
        cores = (attention_bytes_per_token(recipe, device, kind)[1] for kind in kinds)
        restored = local_tokens(recipe) * max(cores)
    return restored + layer if recipe.training.offload_activations else restored


def _layer_bytes(recipe: Recipe, device: Device, kind: AttentionKind) -> float:
    """Return the bytes that one layer saves for one microbatch, without full recomputation."""
    attention, core = attention_bytes_per_token(recipe, device, kind)
    if recipe.recompute.granularity != "selective":
        attention += core
    norms = 2 * _norm_and_projection_input(recipe, device)
    for projection in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        if not _keeps_input(recipe, projection):
            norms -= _hidden_bytes(recipe)
    return local_tokens(recipe) * (norms + attention) + _swiglu_bytes(recipe, device)


def _hidden_bytes(recipe: Recipe) -> float:
    """Return the bytes per token of a rank's hidden states; sequence parallelism shards them."""
    shards = _sequence_shards(recipe)
    return BYTES[recipe.training.precision] * recipe.model.hidden_size / shards


def _sequence_shards(recipe: Recipe) -> int:
    return recipe.parallel.tensor if recipe.parallel.sequence_parallel else 1


def _norm_and_projection_input(recipe: Recipe, device: Device) -> float:
    """Return the bytes per token that RMSNorm and the projection after it save."""
    shards = _sequence_shards(recipe)
    per_token = 2 * _hidden_bytes(recipe) + FLOAT32 / shards
    if device == "cpu":
        hidden = recipe.model.hidden_size / shards
        is_bf16 = recipe.training.precision == "bf16"
        per_token += (2 * FLOAT32 - BYTES["bf16"] if is_bf16 else FLOAT32) * hidden
    return per_token


def attention_bytes_per_token(
    recipe: Recipe, device: Device, kind: AttentionKind
) -> tuple[float, float]:
    """Return the bytes per token that a layer's attention saves: (projections, core attention)."""
    communication = context_communication(recipe)
    has_documents = bool(recipe.data.reset_attention_mask)
    rows = recipe.training.micro_batch_size if has_documents else 1
    keys: float = rows * recipe.training.seq_length
    if communication == "all_gather":
        # Let c be parallel.context. Rank r has chunks r and 2c - 1 - r of the 2c zigzag chunks. A
        # query needs all keys up to the end of its chunk, on average (2c + 1) / (4c) of all keys.
        keys *= (2 * recipe.parallel.context + 1) / (4 * recipe.parallel.context)
    run = LayerRun(
        element=BYTES[recipe.training.precision],
        device=device,
        backend=planned_backend(recipe, kind, device),
        communication=communication,
        context=recipe.parallel.context,
        keys=keys,
        has_mask=has_documents or communication == "all_gather",
        recomputes_core=recipe.recompute.granularity == "selective",
    )
    projected, core = (each / recipe.parallel.tensor for each in costs_of(kind).saved_bytes(run))
    if run.has_mask and known_backend(kind.operation, run.backend).saves_bias:
        core += run.element * run.keys
    return projected, core


def context_communication(recipe: Recipe) -> ContextCommunication | None:
    """Return the kind of context-parallel communication; None without context parallelism."""
    return None if recipe.parallel.context == 1 else chosen_communication(recipe)


def shared_bytes(recipe: Recipe) -> int:
    """Return the bytes of the virtual stages' rotary angles, and of gathered hidden states.

    Only sequence parallelism gathers hidden states, into one buffer that all layers share.
    """
    parallel = recipe.parallel
    positions = recipe.training.seq_length // parallel.context
    shared = FLOAT32 * recipe.model.attention.head_dim * positions * parallel.virtual_pipeline
    if parallel.sequence_parallel:
        element = BYTES[recipe.training.precision]
        shared += element * recipe.model.hidden_size * local_tokens(recipe)
    return shared
