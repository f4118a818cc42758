"""Specs of Megatron-core transformer layers with self-attention of any kind.

A *kind* is a kind of attention with its sizes. A *host* is the library of a layer's linear and
norm classes. The host ``local`` has Megatron-core's linear layers and the :class:`RMSNorm` of this
module. The host ``transformer_engine`` has Transformer Engine's classes.
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

from diffmegatron.attention.kernels.registry import ContextCommunication
from diffmegatron.attention.kinds.kind import AttentionKind, reads_hidden
from diffmegatron.config.model_config import LoraConfig
from diffmegatron.model.layers.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from diffmegatron.model.layers.self_attention import SelfAttention

Host = Literal["local", "transformer_engine"]
Linear: TypeAlias = type | ModuleSpec


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm of the local host, with the constructor arguments of Megatron's norms.

    Megatron's ``WrappedTorchNorm`` does not support sequence parallelism. Here, the weight's
    attribute ``sequence_parallel`` makes :mod:`diffmegatron.optim.reduction` sum the weight's
    gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def available_host(lora: LoraConfig | None = None) -> Host:
    """Return ``transformer_engine`` if it can run and ``lora`` is None, otherwise ``local``.

    Transformer Engine's modules need a CUDA device. Its fused norm and projection does not return
    the normalised input, which LoRA needs.
    """
    is_usable = HAVE_TE and torch.cuda.is_available()
    return "transformer_engine" if is_usable and lora is None else "local"


def final_norm(host: Host) -> type:
    """Return the class of the norm after the last layer."""
    if host == "transformer_engine":
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm
    return RMSNorm


def layer_spec(
    kind: AttentionKind,
    host: Host,
    backend: str = "auto",
    communication: ContextCommunication = "ring",
    lora: LoraConfig | None = None,
    rotary_scale: float = 1.0,
    subtraction: str = "auto",
) -> ModuleSpec:
    """Return the spec of a pre-norm transformer layer.

    ``backend`` is the backend of the kind's operation: ``auto`` to choose in each call, or a name
    that the command ``diffmegatron doctor`` lists. ``communication`` is the method of context
    parallelism. Only the local host supports ``lora``. The rotation multiplies queries
    and keys by ``rotary_scale``. ``subtraction`` is the backend of DIFF V2's subtraction; ``auto``
    for the one that goes with ``backend``.
    """
    input_norm: type = RMSNorm
    mlp_norm: type = RMSNorm
    # Prefixes of checkpoint keys: Transformer Engine's -> the local host's. With this renaming,
    # checkpoints do not depend on the host.
    keys: dict[str, str] = {}
    if host == "local":
        linear = _local_linear(lora)
    else:
        from megatron.core.extensions.transformer_engine import (
            TEColumnParallelLinear,
            TELayerNormColumnParallelLinear,
            TENorm,
            TERowParallelLinear,
        )

        fused, row = TELayerNormColumnParallelLinear, TERowParallelLinear
        linear = {"linear_qkv": fused, "linear_proj": row, "linear_fc1": fused, "linear_fc2": row}
        mlp_norm = IdentityOp
        keys["mlp.linear_fc1.layer_norm_"] = "pre_mlp_layernorm."
        if reads_hidden(kind):
            # The kind also uses the normalised input directly, so do not fuse the norm.
            input_norm, linear["linear_qkv"] = TENorm, TEColumnParallelLinear
        else:
            input_norm = IdentityOp
            keys["self_attention.linear_qkv.layer_norm_"] = "input_layernorm."
    attention = {"kind": kind, "backend": backend, "communication": communication}
    attention |= {"rotary_scale": rotary_scale, "subtraction": subtraction}
    attention |= {name: linear[name] for name in ("linear_qkv", "linear_proj")}
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=input_norm,
            self_attention=ModuleSpec(module=SelfAttention, params=attention),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=mlp_norm,
            mlp=_mlp(linear["linear_fc1"], linear["linear_fc2"]),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=keys,
        ),
    )


def _local_linear(lora: LoraConfig | None) -> dict[str, Linear]:
    column, row = ColumnParallelLinear, RowParallelLinear
    linear: dict[str, Linear] = {
        "linear_qkv": column,
        "linear_proj": row,
        "linear_fc1": column,
        "linear_fc2": row,
    }
    for name in () if lora is None else lora.targets:
        module = LoraColumnParallelLinear if linear[name] is column else LoraRowParallelLinear
        gated = {"gated": True} if name == "linear_fc1" else {}
        linear[name] = ModuleSpec(module=module, params={"lora": lora, **gated})
    return linear


def _mlp(column_linear: Linear, row_linear: Linear) -> type[MLP]:
    """Return a class that builds Megatron-core's MLP with these projections.

    Megatron-core 0.19 warns about a ModuleSpec of the MLP. Version 0.16 lacks the replacement,
    ``MLP.as_mlp_submodule``.
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
