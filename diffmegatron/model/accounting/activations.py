"""Estimate of the activations saved for backward, and of the temporary memory of backward passes.

The functions count bytes on one rank, except where the docstring names another unit. "Saved"
always means saved for the backward pass.

The values depend on ``device``. On a ``gpu``, norms and SwiGLU are fused. On a ``cpu``, torch also
saves their intermediate results. The kernel of differential attention depends on the device too.

The following rules hold on both devices:

- Each attention variant has a method that counts the tensors saved by its kernels
  (``Variant.saved_bytes``).
- A frozen projection saves its input only if it has LoRA. The narrow activations between LoRA's two
  matrices are not counted.
- The input of a frozen attention output projection is always counted, because the attention kernel
  saves it as its result.
"""

from typing import Literal

from diffmegatron.attention.kernels.registry import BACKENDS
from diffmegatron.attention.variants.base import ContextCommunication, Kernels, Variant
from diffmegatron.config.attention_backend import planned_backend
from diffmegatron.config.divisibility import context_communication as chosen_communication
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import (
    EMBEDDING,
    INPUT_NORM,
    LORA_A,
    OUTPUT,
    stage_kinds,
)
from diffmegatron.config.trainable_patterns import is_trained
from diffmegatron.model.accounting.parameters import counted_kinds

Device = Literal["gpu", "cpu"]
# Bytes per element, by the value of training.precision.
BYTES = {"bf16": 2, "fp32": 4}
# Bytes per float32 element.
FLOAT32 = 4


def stage_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes of activations that a pipeline stage holds at the peak of its schedule.

    At the peak, all microbatches in flight (those whose backward pass has not run yet) have saved
    their activations.

    Args:
        recipe: recipe of the run.
        stage: number of the pipeline stage, from 0.
        microbatches: number of microbatches per step.
        device: device of the layers' operations.
    """
    parallel = recipe.parallel
    in_flight = virtual_stages_in_flight(recipe, stage, microbatches)
    kept = in_flight * virtual_stage_bytes(recipe, stage, device) + shared_bytes(recipe)
    sharded = _hidden_bytes(recipe) * local_tokens(recipe)
    if stage == 0 and not (is_trained(recipe, EMBEDDING) or is_trained(recipe, INPUT_NORM)):
        # No gradient depends on the input of the first layer, so no microbatch saves this input.
        kept -= _first_layers_in_flight(recipe, in_flight) * sharded
    # ``exchanged`` is the number of tensors of hidden states that are in memory because of pipeline
    # communication. Megatron-core keeps sent hidden states until their gradient arrives. This is
    # one tensor per forward pass in flight; only the last virtual stage of the network sends none.
    if stage == parallel.pipeline - 1:
        # Add the inputs of the final norm and the output layer for one microbatch.
        kept += final_norm_bytes(recipe, device)
        exchanged = in_flight - 1
    else:
        # Add the gradient received from the next stage. With interleaving, the input of the next
        # forward pass has been received as well, except on the first stage, where that pass begins
        # with the embedding.
        exchanged = in_flight + (2 if parallel.virtual_pipeline > 1 and stage > 0 else 1)
    return round(kept + exchanged * sharded)


def virtual_stages_in_flight(recipe: Recipe, stage: int, microbatches: int) -> int:
    """Return the largest number of forward passes whose backward pass has not run yet.

    A forward pass runs one microbatch through one virtual stage. Without interleaving, the result
    is the number of pipeline stages from this stage to the last. With interleaving, it is the
    number of forward passes before the rank's first backward pass:

    - two per later rank;
    - one per virtual stage except the last, and per microbatch of a round (a round has as many
      microbatches as there are pipeline ranks);
    - one directly before the backward pass.

    In both cases, the result is at most the number of forward passes of this rank in a step. The
    source is ``get_pp_rank_microbatches`` in Megatron-core's pipeline_parallel/schedules.py.
    """
    size, stages = recipe.parallel.pipeline, recipe.parallel.virtual_pipeline
    if stages == 1:
        return min(microbatches, size - stage)
    ahead = 2 * (size - stage - 1) + (stages - 1) * size
    return min(microbatches * stages, ahead + 1)


def _first_layers_in_flight(recipe: Recipe, in_flight: int) -> int:
    """Return how many of the first stage's forward passes in flight include the first layer.

    With interleaving, a rank runs a round of microbatches (as many as there are pipeline ranks)
    through all its virtual stages, one after the other, before it begins the next round.
    """
    size = recipe.parallel.pipeline
    rounds, rest = divmod(in_flight, size * recipe.parallel.virtual_pipeline)
    return rounds * size + min(rest, size)


def local_tokens(recipe: Recipe) -> int:
    """Return the number of tokens of a microbatch on one context-parallel rank."""
    training = recipe.training
    return training.micro_batch_size * training.seq_length // recipe.parallel.context


def layer_backward(recipe: Recipe, stage: int, device: Device) -> tuple[int, int]:
    """Return the temporary memory of one layer's backward pass.

    The peak is at one of two moments in the MLP. The function chooses the moment at which the added
    bytes minus the freed bytes are larger:

    - In SwiGLU's backward pass, memory holds the gradients of SwiGLU's output and inputs. The
      output that was saved for the second projection (fc2) is freed.
    - In the backward pass of the first projection (fc1), memory holds the gradients of its output,
      weight and input. Everything that SwiGLU and fc2 saved is freed. On a CPU only this moment is
      considered.

    At both moments, memory also holds the gradient of the residual stream and, with recomputation
    or offloading, the activations of the layer that is recomputed or copied from the host. The
    gradient of a tied embedding from the output layer also stays in memory, until the embedding's
    own gradient is added to it. In the last stage, the tensors that the final norm and the output
    layer saved are already freed. This is counted only on a GPU without offloading.

    Returns:
        Bytes in addition to the saved activations, and bytes of the saved activations that are
        already freed. With full recomputation or offloading, the freed activations of the layer
        are among the recomputed or copied ones, so they are subtracted from the first number
        instead.
    """
    model, parallel = recipe.model, recipe.parallel
    element, tokens = BYTES[recipe.training.precision], local_tokens(recipe)
    ffn = model.ffn_hidden_size / parallel.tensor
    shards = parallel.tensor if parallel.sequence_parallel else 1
    # ``streams`` is the number of gradients of the residual stream that are counted here. The one
    # received from the next stage is not among them, because stage_activations counts it.
    # - First stage of a pipeline: 0.
    # - Stages in the middle: 1, the gradient that they sent last, which Megatron-core's schedule
    #   keeps until the next backward pass has ended.
    # - Last stage, or no pipeline: 1, the gradient that comes from the loss.
    # - With interleaving and one layer per virtual stage: 1 more, as the training steps that
    #   tests/simulated_cuda executes show.
    virtual_stages = parallel.pipeline * parallel.virtual_pipeline
    is_copied = parallel.virtual_pipeline > 1 and model.num_layers == virtual_stages
    streams = (stage > 0 or parallel.pipeline == 1) + is_copied
    again = _recomputed_bytes(recipe, device) + _offloaded_bytes(recipe, device)
    if sums_tied_gradients(recipe):
        again += element * output_weight(recipe)
    again += tokens * streams * _hidden_bytes(recipe)

    # Under sequence parallelism, the gradient of fc1's input is reduced into another tensor.
    states = 2 * ffn + model.hidden_size + (model.hidden_size / shards if shards > 1 else 0)
    weight = 2 * ffn * model.hidden_size if is_trained(recipe, "mlp.linear_fc1.weight") else 0
    projection = element * (tokens * states + weight), _swiglu_bytes(recipe, device)
    product = element * tokens * ffn
    freed_product = product if _keeps_input(recipe, "mlp.linear_fc2") else 0
    is_fused = device == "gpu"
    moments = [projection, (3 * product, freed_product)] if is_fused else [projection]
    beside, freed = max(moments, key=lambda each: each[0] - each[1])
    if recipe.recompute.granularity == "full" or recipe.training.offload_activations:
        again, freed = again - freed, 0
    # On a CPU, do not subtract the final norm's freed activations: the temporary results of unfused
    # operations are not counted and are about as large.
    if is_fused and stage == parallel.pipeline - 1 and not recipe.training.offload_activations:
        freed += final_norm_bytes(recipe, device)
    return round(beside + again), round(freed)


def _swiglu_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes that SwiGLU and the projection after it (fc2) save for one microbatch.

    SwiGLU saves its two inputs, gate and up. fc2 saves the product of silu(gate) and up. Unfused
    SwiGLU also saves the two factors of this product in new tensors: silu(gate), and the sum of up
    and Megatron-core's ``glu_linear_offset``, which is 0 here.
    """
    factors = 2 if device == "gpu" else 4
    factors += _keeps_input(recipe, "mlp.linear_fc2")
    element, ffn = BYTES[recipe.training.precision], recipe.model.ffn_hidden_size
    return local_tokens(recipe) * factors * element * ffn / recipe.parallel.tensor


def logits_bytes(recipe: Recipe, device: Device) -> int:
    """Return the temporary bytes of the loss and of the output layer's backward pass.

    The peak is at one of two moments. The function returns the larger one:

    - In the cross-entropy, memory holds the logits. On a GPU their gradient overwrites them. On a
      CPU Megatron-core's cross-entropy overwrites float32 logits with probabilities; for bf16
      logits, the float32 probabilities are another tensor.
    - In the output layer's backward pass, memory holds the gradients of the logits, of the weight
      and of the hidden states.

    If the loss is computed in chunks of tokens (``training.loss_chunk``), only one chunk has logits
    at a time, and a second tensor accumulates the weight gradients of the chunks.

    In the output layer's backward pass, up to two more tensors of the size of this rank's hidden
    states are counted:

    1. With chunks, the tensor that collects the gradients of the chunks' hidden states. Without
       chunks but with sequence parallelism, the tensor into which the gradient of the hidden states
       is reduced; it is not counted if the output layer is frozen, because the gradient of the
       logits is then freed before the reduction.
    2. With a pipeline, the gradient that the stage sent last, which Megatron-core's schedule keeps.
       With offloaded activations, the output layer's input after its copy from the host. With both,
       only one tensor is counted.
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
    is_reduced = parallel.sequence_parallel and output_weight(recipe) > 0
    if is_reduced or chunk < tokens:
        hidden_gradient += sharded
    gradients = 2 if chunk < tokens else 1
    backward = element * (chunk * vocabulary + gradients * output_weight(recipe)) + hidden_gradient
    if training.offload_activations or parallel.pipeline > 1:
        backward += sharded
    return round(max(per_logit * chunk * vocabulary, backward))


def output_weight(recipe: Recipe) -> int:
    """Return the number of elements of the output layer's weight gradient on a rank.

    It is 0 if the weight is frozen.
    """
    if not is_trained(recipe, EMBEDDING if recipe.model.tied_embeddings else OUTPUT):
        return 0
    return vocabulary_elements(recipe)


def vocabulary_elements(recipe: Recipe) -> int:
    """Return the number of elements of a vocabulary matrix on a tensor-parallel rank.

    The embedding and the output layer are vocabulary matrices. They are the largest parameters.
    """
    return recipe.model.vocab_size * recipe.model.hidden_size // recipe.parallel.tensor


def final_hidden_bytes(recipe: Recipe) -> int:
    """Return the bytes of the hidden states after the last layer, or of their gradient."""
    return round(_hidden_bytes(recipe) * local_tokens(recipe))


def final_norm_bytes(recipe: Recipe, device: Device) -> int:
    """Return the bytes that the final norm and the output layer save for one microbatch."""
    return round(local_tokens(recipe) * _norm_and_projection_input(recipe, device))


def _keeps_input(recipe: Recipe, projection: str) -> bool:
    """Return whether the projections with the given name save their input for the backward pass.

    The input is needed for the gradient of the projection's weight, or of its LoRA matrix A.
    """
    return is_trained(recipe, f"{projection}.weight") or is_trained(
        recipe, f"{projection}.{LORA_A}"
    )


def embedding_backward(recipe: Recipe, stage: int) -> int:
    """Return the temporary bytes of the embedding's backward pass.

    They are the gradients of the embedding's weight and of its output. Under sequence parallelism,
    the output's gradient is gathered from another tensor, which is counted too. A tied embedding
    without a pipeline has two gradients of its weight.

    The result is 0 on all pipeline stages except the first, and if the embedding is frozen. It is
    also 0 for an untied embedding without a pipeline, because the embedding's backward pass then
    needs less memory than that of the output layer. :func:`embedding_freed` counts the activations
    that are freed before the embedding's backward pass.
    """
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

    Without a pipeline, these are all saved activations except the tensors that all microbatches
    share. In a pipeline, these are only the activations of the microbatch whose backward pass runs,
    because other microbatches are in flight. The result is 0 if activations are offloaded to the
    host.
    """
    if recipe.training.offload_activations:
        return 0
    if recipe.parallel.pipeline > 1:
        return round(virtual_stage_bytes(recipe, stage, device))
    return stage_activations(recipe, stage, microbatches, device) - shared_bytes(recipe)


def sums_tied_gradients(recipe: Recipe) -> bool:
    """Return whether autograd sums the two gradients of a tied embedding on the same rank.

    The embedding and the output layer each have a gradient of the tied weight. Without a pipeline
    they are on the same rank. The result is false in a pipeline, and if the embedding is frozen.
    """
    is_tied = recipe.model.tied_embeddings and recipe.parallel.pipeline == 1
    return is_tied and is_trained(recipe, EMBEDDING)


def offloaded_activations(recipe: Recipe, stage: int, microbatches: int, device: Device) -> int:
    """Return the bytes of activations that are offloaded to host memory; 0 without offloading."""
    if not recipe.training.offload_activations:
        return 0
    return stage_activations(recipe, stage, microbatches, device) - shared_bytes(recipe)


def virtual_stage_bytes(recipe: Recipe, stage: int, device: Device) -> float:
    """Return the bytes that a virtual stage saves for one microbatch.

    Of fully recomputed layers, only inputs are saved: one per group of layers with the method
    "uniform", and one per recomputed layer with "block". If the layers of the pipeline stage have
    different attention variants, the mean over these layers is used.
    """
    recompute, kinds = recipe.recompute, stage_kinds(recipe, stage)
    count = sum(count for _, count in kinds)
    layers = count // recipe.parallel.virtual_pipeline
    whole = sum(count * _layer_bytes(recipe, device, kind) for kind, count in kinds) / count
    # Bytes of the input of a recomputed layer, which sequence parallelism shards.
    entrance = _hidden_bytes(recipe) * local_tokens(recipe)
    if recompute.granularity != "full":
        return layers * whole
    if recompute.method == "uniform":
        return -(-layers // recompute.layers) * entrance
    return recompute.layers * entrance + (layers - recompute.layers) * whole


def _recomputed_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes of the activations that recomputation creates again at one time.

    With the granularity "full" these are the activations of all layers of a group (method
    "uniform") or of one layer (method "block"). With "selective" they are those of one layer's core
    attention. If layers have different attention variants, the largest result counts.
    """
    recompute = recipe.recompute
    if recompute.granularity == "none":
        return 0
    kinds = [kind for kind, _ in counted_kinds(recipe.model)]
    if recompute.granularity == "selective":
        cores = (attention_bytes_per_token(recipe, device, kind)[1] for kind in kinds)
        return local_tokens(recipe) * max(cores)
    together = recompute.layers if recompute.method == "uniform" else 1
    layers = (_layer_bytes(recipe, device, kind, recomputed=True) for kind in kinds)
    return together * max(layers)


def _offloaded_bytes(recipe: Recipe, device: Device) -> float:
    """Return the bytes of one layer's offloaded activations while they are back on the device.

    If layers have different attention variants, the largest result counts.
    """
    if not recipe.training.offload_activations:
        return 0
    return max(_layer_bytes(recipe, device, kind) for kind, _ in counted_kinds(recipe.model))


def _layer_bytes(
    recipe: Recipe, device: Device, kind: Variant, *, recomputed: bool = False
) -> float:
    """Return the bytes that one layer saves for one microbatch.

    They are those of the two norms, the projections, attention and SwiGLU. With selective
    recomputation a layer does not save the activations of its core attention.

    Args:
        recipe: recipe of the run.
        device: device of the layer's operations.
        kind: attention variant of the layer.
        recomputed: whether the layer is being recomputed. If so, it saves all its activations.
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
    """Return the bytes per token of a rank's hidden states; sequence parallelism shards them."""
    shards = recipe.parallel.tensor if recipe.parallel.sequence_parallel else 1
    return BYTES[recipe.training.precision] * recipe.model.hidden_size / shards


def _norm_and_projection_input(recipe: Recipe, device: Device) -> float:
    """Return the bytes per token that RMSNorm and the projection after it save.

    A fused RMSNorm saves its input and one float32 per token, and the projection saves its own
    input. Sequence parallelism shards all of them, because Megatron-core gathers the projection's
    input again in the backward pass. An unfused norm also saves the normalized input in float32. In
    bf16 it saves its input in float32 instead of bf16.
    """
    shards = recipe.parallel.tensor if recipe.parallel.sequence_parallel else 1
    per_token = 2 * _hidden_bytes(recipe) + FLOAT32 / shards
    if device == "cpu":
        hidden = recipe.model.hidden_size / shards
        is_bf16 = recipe.training.precision == "bf16"
        per_token += (2 * FLOAT32 - BYTES["bf16"] if is_bf16 else FLOAT32) * hidden
    return per_token


def attention_bytes_per_token(recipe: Recipe, device: Device, kind: Variant) -> tuple[float, float]:
    """Return the bytes per token that the attention of one layer saves.

    Returns:
        Bytes of q, k, v and the output projection's input; and bytes that the core attention saves
        in addition, including a dense mask if the kernels save one.
    """
    kernels = _kernels(recipe, device, kind)
    projected, core = (each / recipe.parallel.tensor for each in kind.saved_bytes(kernels))
    if kernels.has_mask and BACKENDS[kind.operation][kernels.backend].saves_bias:
        core += kernels.element * kernels.keys
    return projected, core


def _kernels(recipe: Recipe, device: Device, kind: Variant) -> Kernels:
    communication = context_communication(recipe)
    has_documents = bool(recipe.data.reset_attention_mask)
    rows = recipe.training.micro_batch_size if has_documents else 1
    keys: float = rows * recipe.training.seq_length
    if communication == "all_gather":
        # Zigzag sharding splits a sequence into 2 x context chunks. Rank r has chunk r and the r-th
        # chunk from the end. The keys of each chunk's attention call end with the chunk. On average
        # over both chunks, this is (2 x context + 1) / (4 x context) of the sequence.
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
    """Return the kind of context-parallel communication; None without context parallelism."""
    return None if recipe.parallel.context == 1 else chosen_communication(recipe)


def shared_bytes(recipe: Recipe) -> int:
    """Return the bytes of the tensors that layers and microbatches share.

    These are the rotary angles, one tensor per virtual stage. Under sequence parallelism there is
    also one buffer into which Megatron-core gathers the hidden states of the tensor-parallel ranks.
    """
    parallel = recipe.parallel
    positions = recipe.training.seq_length // parallel.context
    shared = FLOAT32 * recipe.model.attention.head_dim * positions * parallel.virtual_pipeline
    if parallel.sequence_parallel:
        element = BYTES[recipe.training.precision]
        shared += element * recipe.model.hidden_size * local_tokens(recipe)
    return shared
