"""A recipe's network as Megatron-core's GPTModel, on this rank's stage."""

import math

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, distributed

from diffmegatron.attention.core import DifferentialCoreAttention
from diffmegatron.attention.kernels.select import choose_backend, importable_libraries
from diffmegatron.attention.specs import available_host, final_norm, layer_spec
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.initialize import initialize
from diffmegatron.model.shards import parameter_shards
from diffmegatron.parallel.topology import Topology

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """Megatron-core's view of the recipe.

    Heads are counted as Megatron counts them: 2h query heads and 2 h_kv groups of ``head_dim``,
    for both twins.
    """
    model, parallel = recipe.model, recipe.parallel
    dtype = DTYPES[recipe.training.precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Weights come from diffmegatron.model.initialize, the same for every layout.
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence_parallel,
        # The fused SwiGLU is compiled by TorchScript at its first call: 19 s on a CPU.
        bias_activation_fusion=torch.cuda.is_available(),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        # Interleaved schedules on gloo are silently wrong with batched sends.
        batch_p2p_comm=torch.cuda.is_available(),
    )


def build_model(recipe: Recipe, topology: Topology, *, initial_weights: bool = True) -> GPTModel:
    """This rank's stage of the network, on its device.

    Args:
        recipe: sizes, twin, layout, precision, seed.
        topology: where this rank stands.
        initial_weights: whether to fill it; without, the weights are arbitrary.

    Returns:
        GPTModel: ``(tokens [b, s], position_ids [b, s], None, labels=[b, s])`` gives the loss of
        each token, [b, s] float32, or without labels this tensor-parallel rank's logits.

    Raises:
        UserError: the attention backend asked for cannot run here.
    """
    model, backend = recipe.model, recipe.training.attention_backend
    _check_backend(recipe, topology)
    config = transformer_config(recipe)
    host = available_host()
    layers = [layer_spec(model, host, backend)] * get_num_layers_to_build(config)
    network = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=layers, layer_norm=final_norm(host)
        ),
        vocab_size=model.vocab_size,
        max_sequence_length=recipe.training.seq_length,
        pre_process=topology.is_first_stage,
        post_process=topology.is_last_stage,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
    ).to(topology.device)
    if initial_weights:
        initialize(network, recipe)
    _mark_tensor_parallel(network)
    if recipe.parallel.sequence_parallel:
        _sum_sequence_parallel_gradients(network, topology)
    return network


def _check_backend(recipe: Recipe, topology: Topology) -> None:
    """Say before the first step what the kernels would say in it."""
    dtype, device = DTYPES[recipe.training.precision], topology.device.type
    if not recipe.model.is_differential:
        return
    try:
        choose_backend(
            recipe.training.attention_backend,
            device,
            dtype,
            recipe.model.head_dim,
            importable_libraries(),
        )
    except ValueError as error:
        raise UserError(f"training.attention_{error}") from None


def lambda_by_layer(network: GPTModel) -> dict[int, float]:
    """lambda of this stage's layers by global layer number; empty for the Transformer."""
    return {
        module.layer_number: module.current_lambda().item()
        for module in network.modules()
        if isinstance(module, DifferentialCoreAttention)
    }


def _mark_tensor_parallel(network: GPTModel) -> None:
    """Mark the parameters this rank holds a part of: a gradient norm counts the others once.

    Megatron marks parameters while it initialises them, which we do in its place.
    """
    for parameter, shards in parameter_shards(network).items():
        whole = math.prod(shards[0].global_shape)
        parameter.tensor_model_parallel = parameter.numel() < whole  # type: ignore[attr-defined]


def _sum_sequence_parallel_gradients(network: GPTModel, topology: Topology) -> None:
    """Sum over the tensor-parallel ranks what each saw of its part of the sequence.

    Megatron's own data-parallel wrapper does this for parameters it marks ``sequence_parallel``;
    under DeepSpeed nobody would, and the ranks would silently diverge.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=topology.tensor_group)
        return total

    for parameter in network.parameters():
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(summed)
