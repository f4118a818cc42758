"""Construction of this rank's pipeline stage of the network from Megatron-core's modules."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from diffmegatron.attention.kernels.installed_backends import chip_of, importable_libraries
from diffmegatron.config.attention_backend import chosen_kernels, chosen_loss, layer_backend
from diffmegatron.config.divisibility import choose_context_communication
from diffmegatron.config.parallel_config import RecomputeConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import stage_layers
from diffmegatron.config.training_config import Fp8Config
from diffmegatron.model.initialize import initialize
from diffmegatron.model.layers.layer_specs import available_host, final_norm, layer_spec
from diffmegatron.model.network import Network, VirtualStage
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.model.trainable import divide_final_gradient, mark_trained
from diffmegatron.parallel.parallel_state import ParallelState

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """Return Megatron-core's configuration for a recipe.

    The attention layers ignore its numbers of heads and use ``heads`` of their kind of attention.
    """
    model, parallel = recipe.model, recipe.parallel
    heads = model.attention.kinds[0].heads
    dtype = DTYPES[recipe.training.precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=heads.queries,
        num_query_groups=heads.blocks,
        kv_channels=heads.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # diffmegatron.model.initialize sets the weights.
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=(
            parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
        ),
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.sequence_parallel,
        **_recompute(recipe.recompute),
        **_fp8(recipe.training.fp8),
        # On a CPU, compiling the fused SwiGLU takes about a minute.
        bias_activation_fusion=torch.cuda.is_available(),
        # Without this mode, CUDA sums the embedding's gradient in an order that changes per run.
        deterministic_mode=recipe.training.deterministic,
        # With batched sends on gloo, interleaved schedules silently compute wrong results.
        batch_p2p_comm=torch.cuda.is_available(),
        # Only old versions of torch need to synchronize the device after batched sends.
        batch_p2p_sync=False,
    )


def build_model(
    recipe: Recipe, parallel_state: ParallelState, *, initial_weights: bool = True
) -> Network:
    """Build all virtual stages of this pipeline rank, with initial or uninitialized weights."""
    config, backends = transformer_config(recipe), _choose_backends(recipe, parallel_state)
    stages = [
        _build_virtual_stage(recipe, config, backends, parallel_state, number)
        for number in range(parallel_state.virtual_pipeline_size)
    ]
    network = Network(stages).to(parallel_state.device)
    if initial_weights:
        initialize(network, recipe)
    for parameter, shards in parameter_shards(network).items():
        # If ``tensor_model_parallel`` is False, DeepSpeed's gradient norm includes the parameter on
        # only one tensor-parallel rank. Megatron sets the attribute only in its own initialization.
        is_sharded = parameter.numel() < math.prod(shards[0].global_shape)
        parameter.tensor_model_parallel = is_sharded  # type: ignore[attr-defined]
    mark_trained(network, recipe)
    divide_final_gradient(network, recipe)
    return network


def _build_virtual_stage(
    recipe: Recipe,
    config: TransformerConfig,
    backends: Sequence[str],
    parallel_state: ParallelState,
    number: int,
) -> VirtualStage:
    model, host = recipe.model, available_host(recipe.model.lora)
    stages = parallel_state.virtual_pipeline_size
    communication = choose_context_communication(recipe)
    layers = stage_layers(recipe, parallel_state.pipeline_rank)[number]
    scale = 1.0 if model.rope_scaling is None else model.rope_scaling.rotation_scale
    specs = [
        layer_spec(
            model.attention.of_layer(layer),
            host,
            backends[layer],
            communication,
            model.lora,
            scale,
            _subtraction(recipe, layer, parallel_state),
        )
        for layer in layers
    ]
    return VirtualStage(
        config,
        specs,
        final_norm(host),
        vocab_size=model.vocab_size,
        vocab_padding=model.vocab_padding,
        rope_theta=model.rope_theta,
        rope_scaling=model.rope_scaling,
        loss_chunk=recipe.training.loss_chunk,
        z_loss=recipe.training.z_loss,
        loss_kernel=chosen_loss(recipe, parallel_state.device.type, importable_libraries()),
        tied_embeddings=model.tied_embeddings,
        pre_process=parallel_state.is_first_stage and number == 0,
        post_process=parallel_state.is_last_stage and number == stages - 1,
        vp_stage=number if stages > 1 else None,
    )


def _recompute(recompute: RecomputeConfig) -> dict[str, Any]:
    if recompute.granularity == "none":
        return {}
    if recompute.granularity == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": recompute.method,
        "recompute_num_layers": recompute.layers,
    }


def _fp8(fp8: Fp8Config | None) -> dict[str, Any]:
    if fp8 is None:
        return {}
    # The formats and the history are the defaults of Transformer Engine's recipes.
    is_per_tensor = fp8.recipe in ("tensorwise", "delayed")
    return {
        "fp8": "hybrid" if is_per_tensor else "e4m3",
        "fp8_recipe": fp8.recipe,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "first_last_layers_bf16": fp8.first_layers_bf16 + fp8.last_layers_bf16 > 0,
        "num_layers_at_start_in_bf16": fp8.first_layers_bf16,
        "num_layers_at_end_in_bf16": fp8.last_layers_bf16,
    }


def _choose_backends(recipe: Recipe, parallel_state: ParallelState) -> list[str]:
    """Return the name of the attention backend of each layer in the network, and log each choice.

    The list covers all pipeline stages, so that all ranks refuse an impossible choice.
    """
    device, libraries = parallel_state.device, importable_libraries()
    choices = [
        layer_backend(recipe, kind, device.type, libraries, chip_of(device))
        for kind in map(recipe.model.attention.of_layer, range(recipe.model.num_layers))
    ]
    for name, reason in dict.fromkeys(choices):
        log.info("attention backend %s: %s", name, reason)
    return [name for name, _ in choices]


def _subtraction(recipe: Recipe, layer: int, parallel_state: ParallelState) -> str:
    """Return the backend of the subtraction in a layer of DIFF V2, or "auto"."""
    kind = recipe.model.attention.of_layer(layer)
    chosen = chosen_kernels(recipe, kind, parallel_state.device.type)
    return "auto" if chosen is None else chosen.subtraction
