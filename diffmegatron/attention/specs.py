"""Layer specs: the twins' core attention inside Megatron's own layers.

Two hosts. ``local`` uses Megatron-core's own linear layers and our RMSNorm; ``transformer_engine``
uses Transformer Engine's classes around the same core attention and is taken wherever
``transformer_engine`` imports.
"""

import importlib.util
from typing import Literal

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from diffmegatron.attention.core import (
    ContextExchange,
    DifferentialCoreAttention,
    SoftmaxCoreAttention,
)
from diffmegatron.attention.norm import RMSNorm
from diffmegatron.config.schema import ModelConfig

Host = Literal["local", "transformer_engine"]


def available_host() -> Host:
    """The host of the layers: Transformer Engine where it is installed, else local."""
    found = importlib.util.find_spec("transformer_engine") is not None
    return "transformer_engine" if found else "local"


def layer_spec(
    model: ModelConfig,
    host: Host,
    backend: str = "auto",
    exchange: ContextExchange = "ring",
) -> ModuleSpec:
    """The spec of one transformer layer: pre-norm, no biases, SwiGLU.

    Args:
        model: which twin, and its sizes.
        host: whose linear and norm classes.
        backend: the differential attention kernel, ``auto`` or a name that ``doctor`` lists.
        exchange: what context-parallel ranks exchange, where there are any.
    """
    core_attention = _core_attention(model, backend, exchange)
    if host == "transformer_engine":
        return _transformer_engine_layer(core_attention)
    return _local_layer(core_attention)


def final_norm(host: Host) -> type:
    """The class of the norm after the last layer."""
    if host == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _core_attention(model: ModelConfig, backend: str, exchange: ContextExchange) -> ModuleSpec:
    twin = DifferentialCoreAttention if model.is_differential else SoftmaxCoreAttention
    params = {"model": model, "backend": backend, "exchange": exchange}
    return ModuleSpec(module=twin, params=params)


def _local_layer(core_attention: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_self_attention(ColumnParallelLinear, core_attention, RowParallelLinear),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp(ColumnParallelLinear, RowParallelLinear),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _transformer_engine_layer(core_attention: ModuleSpec) -> ModuleSpec:
    """Norm and following projection are one class here, so the checkpoint's keys are mapped back.

    Not run yet on a machine with Transformer Engine: see docs/architecture.md.
    """
    from megatron.core.extensions.transformer_engine import (
        TELayerNormColumnParallelLinear,
        TERowParallelLinear,
    )

    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp,
            self_attention=_self_attention(
                TELayerNormColumnParallelLinear, core_attention, TERowParallelLinear
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=_mlp(TELayerNormColumnParallelLinear, TERowParallelLinear),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map={
                "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
                "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
            },
        ),
    )


def _self_attention(
    column_linear: type, core_attention: ModuleSpec, row_linear: type
) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column_linear,
            core_attention=core_attention,
            linear_proj=row_linear,
            q_layernorm=IdentityOp,
            k_layernorm=IdentityOp,
        ),
    )


def _mlp(column_linear: type, row_linear: type) -> ModuleSpec:
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=column_linear, linear_fc2=row_linear)
    )
