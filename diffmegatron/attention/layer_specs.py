"""Layer specs: a variant's self-attention inside Megatron's own layers.

A *host* is the library of a layer's linear and norm classes. ``local`` uses Megatron-core's own
linear layers and our RMSNorm. ``transformer_engine`` uses Transformer Engine's classes around the
same attention. :func:`available_host` chooses the host.
"""

from typing import Literal, TypeAlias

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from diffmegatron.attention.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from diffmegatron.attention.rms_norm import RMSNorm
from diffmegatron.attention.self_attention import SelfAttention, SelfAttentionSubmodules
from diffmegatron.attention.variants.base import ContextCommunication, Variant
from diffmegatron.config.model_config import LoraConfig

Host = Literal["local", "transformer_engine"]
Linear: TypeAlias = type | ModuleSpec


def available_host(lora: LoraConfig | None = None) -> Host:
    """Return ``transformer_engine`` if it can run and there is no LoRA, and ``local`` if not.

    Transformer Engine's modules cannot be built without a CUDA device. LoRA needs the normalised
    input of a projection. Transformer Engine computes the norm and the projection in one module and
    does not return this input.
    """
    is_usable = HAVE_TE and torch.cuda.is_available()
    return "transformer_engine" if is_usable and lora is None else "local"


def layer_spec(
    variant: Variant,
    host: Host,
    backend: str = "auto",
    communication: ContextCommunication = "ring",
    lora: LoraConfig | None = None,
) -> ModuleSpec:
    """Return the spec of one transformer layer: pre-norm, no biases, SwiGLU.

    Args:
        variant: kind of attention and its sizes.
        host: library of the linear and norm classes.
        backend: kernel implementation of differential attention: ``auto``, or a name that the
            command ``diffmegatron doctor`` lists. For softmax attention, ``auto`` is used.
        communication: method of communication between context-parallel ranks.
        lora: LoRA of the projections, for the local host only.
    """
    attention = {"variant": variant, "backend": backend, "communication": communication}
    if host == "transformer_engine":
        return _transformer_engine_layer(attention)
    return _local_layer(attention, lora)


def final_norm(host: Host) -> type:
    """Return the class of the norm after the last layer."""
    if host == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def _local_layer(attention: dict[str, object], lora: LoraConfig | None) -> ModuleSpec:
    linear = _linear_layers(lora)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=_self_attention(attention, linear["linear_qkv"], linear["linear_proj"]),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RMSNorm,
            mlp=_mlp(linear["linear_fc1"], linear["linear_fc2"]),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _linear_layers(lora: LoraConfig | None) -> dict[str, Linear]:
    """Return a dict from the names of a layer's projections to their classes or specs."""
    plain: dict[str, Linear] = {
        "linear_qkv": ColumnParallelLinear,
        "linear_proj": RowParallelLinear,
        "linear_fc1": ColumnParallelLinear,
        "linear_fc2": RowParallelLinear,
    }
    if lora is None:
        return plain
    column, row = LoraColumnParallelLinear, LoraRowParallelLinear
    adapted = {
        "linear_qkv": ModuleSpec(module=column, params={"lora": lora}),
        "linear_proj": ModuleSpec(module=row, params={"lora": lora}),
        "linear_fc1": ModuleSpec(module=column, params={"lora": lora, "gated": True}),
        "linear_fc2": ModuleSpec(module=row, params={"lora": lora}),
    }
    return plain | {name: adapted[name] for name in lora.targets}


def _transformer_engine_layer(attention: dict[str, object]) -> ModuleSpec:
    """Build the spec of a layer whose norms are fused with the projections that follow them.

    A variant with ``reads_hidden`` uses the normalised input also outside of ``linear_qkv``, so its
    norm before attention is a separate module. The map of checkpoint keys renames the weights of
    fused norms as in the local layer, so checkpoints do not depend on the host.
    """
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    variant = attention["variant"]
    assert isinstance(variant, Variant)
    keys = {"mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm."}
    input_norm, linear_qkv = TENorm, TEColumnParallelLinear
    if not variant.reads_hidden:
        input_norm, linear_qkv = IdentityOp, TELayerNormColumnParallelLinear
        keys["self_attention.linear_qkv.layer_norm_"] = "input_layernorm."
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=_self_attention(attention, linear_qkv, TERowParallelLinear),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp,
            mlp=_mlp(TELayerNormColumnParallelLinear, TERowParallelLinear),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _self_attention(
    attention: dict[str, object], column_linear: Linear, row_linear: Linear
) -> ModuleSpec:
    return ModuleSpec(
        module=SelfAttention,
        params=attention,
        submodules=SelfAttentionSubmodules(linear_qkv=column_linear, linear_proj=row_linear),
    )


def _mlp(column_linear: Linear, row_linear: Linear) -> type[MLP]:
    """Return a class that builds Megatron-core's MLP with these projections.

    All supported versions of Megatron-core build a class in the same way. With a ModuleSpec,
    version 0.16 passes additional arguments only to its own MLP classes, and version 0.19 emits a
    warning.
    """

    class ProjectedMLP(MLP):
        def __init__(
            self,
            config: TransformerConfig,
            pg_collection: ProcessGroupCollection | None = None,
            **_: object,
        ) -> None:
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp"])
            super().__init__(
                config,
                MLPSubmodules(linear_fc1=column_linear, linear_fc2=row_linear),
                ffn_hidden_size=config.ffn_hidden_size,
                tp_group=groups.tp,
            )

    return ProjectedMLP
