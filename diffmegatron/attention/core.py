"""The core-attention modules that Megatron's SelfAttention hosts.

Megatron projects, rotates and shards; these modules turn its q, k, v into the layer's head
outputs. The heads arrive as Megatron groups them, for a differential model with h heads of
query/key width d and h_kv key-value heads:

    query groups 2j and 2j + 1 belong to differential key-value head j: the first holds the keys
    (and queries) of map 1, the second those of map 2, and their two d-wide values side by side
    are the head's 2d-wide value. Differential head n = j r + i (r = h / h_kv) has q1 = query i of
    group 2j and q2 = query i of group 2j + 1.

So q is (h_kv, 2, r, d) along its heads, k and v are (h_kv, 2, d), and the output, h heads of 2d,
is as wide as the 2h heads of d that ``linear_proj`` expects.
"""

from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from diffmegatron.attention.kernels import diff_attention, softmax_attention
from diffmegatron.attention.lambdas import differential_lambda, lambda_init
from diffmegatron.config.schema import ModelConfig

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class HeadNorm(torch.nn.Module):
    """RMSNorm over the channels of each head on its own, weight [channels] float32.

    Mirrors the reference code's ``subln``: eps inside the root, one weight for all heads, float32
    arithmetic whatever the input's dtype.
    """

    def __init__(self, channels: int, eps: float) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=torch.float32))

    def forward(self, heads: Tensor, weight: Tensor) -> Tensor:
        """Normalise [..., channels]; ``weight`` is the weight as the layer passes it on."""
        return torch.nn.functional.rms_norm(heads.float(), (self.channels,), weight, self.eps)


class _CoreAttention(MegatronModule):
    """What both twins share: Megatron's calling convention, the norm, float32 own parameters."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        model: ModelConfig,
        backend: str,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.causal = attn_mask_type == AttnMaskType.causal
        self.softmax_scale = softmax_scale
        self.backend = backend
        self.tensor_group = pg_collection.tp if pg_collection is not None else None
        self.norm = (
            HeadNorm(model.head_norm_dim, model.norm_eps) if model.has_headwise_norm else None
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        """Keep this module's parameters in float32 when the model around it is cast to bf16.

        Rounding the lambda vectors to bf16 moves lambda by 1e-3 to 5e-3.
        """

        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        return super()._apply(keep_float32, recurse)

    def _replicated(self, parameter: Tensor) -> Tensor:
        """A parameter every tensor-parallel rank holds whole.

        Each rank sees only its own heads' share of the gradient; Megatron's region sums it over
        the ranks, with and without sequence parallelism (the ``sequence_parallel`` attribute
        would sum only with).
        """
        return copy_to_tensor_model_parallel_region(parameter, group=self.tensor_group)

    def _normalise(self, heads: Tensor) -> Tensor:
        if self.norm is None:
            return heads
        return self.norm(heads, self._replicated(self.norm.weight))


class DifferentialCoreAttention(_CoreAttention):
    """(softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V per head, then the norm.

    Ye et al., ICLR 2025, equations 1 to 3; the norm's output is scaled by 1 - lambda_init.
    """

    def __init__(self, *args: object, model: ModelConfig, **kwargs: object) -> None:
        super().__init__(*args, model=model, **kwargs)  # type: ignore[arg-type]
        self.head_dim = model.head_dim
        self.lambda_init = lambda_init(model.lambda_init, self.layer_number)
        for name in LAMBDA_VECTORS:
            vector = torch.nn.Parameter(torch.zeros(model.head_dim, dtype=torch.float32))
            self.register_parameter(name, vector)

    def current_lambda(self) -> Tensor:
        """lambda of this layer, a 0-dim float32 tensor."""
        q1, k1, q2, k2 = (self._replicated(getattr(self, name)) for name in LAMBDA_VECTORS)
        return differential_lambda(q1, k1, q2, k2, self.lambda_init)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Head outputs of this rank's heads.

        Args:
            query: [s, b, 2h, d]; key, value: [s, b, 2 h_kv, d], heads as the module says.
            attention_mask: not used, the mask is causal.

        Returns:
            [s, b, 2h d], in ``query``'s dtype.
        """
        length, batch, _, d = query.shape
        kv_heads = key.shape[2] // 2
        # [s, b, (h_kv, 2, r), d] -> two of [b, s, h, d]
        q1, q2 = query.view(length, batch, kv_heads, 2, -1, d).permute(3, 1, 0, 2, 4, 5).unbind()
        k1, k2 = key.view(length, batch, kv_heads, 2, d).permute(3, 1, 0, 2, 4).unbind()
        heads = diff_attention(
            q1.flatten(2, 3),
            k1,
            q2.flatten(2, 3),
            k2,
            value.reshape(length, batch, kv_heads, 2 * d).transpose(0, 1),
            self.current_lambda(),
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            backend=self.backend,
        )
        if self.norm is not None:
            heads = self._normalise(heads) * (1.0 - self.lambda_init)
        return heads.to(query.dtype).transpose(0, 1).reshape(length, batch, -1)


class SoftmaxCoreAttention(_CoreAttention):
    """softmax(Q K^T / sqrt(d)) V per head: the Transformer of the pair, through the same calls."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Head outputs of this rank's heads.

        Args:
            query: [s, b, 2h, d]; key, value: [s, b, 2 h_kv, d].
            attention_mask: not used, the mask is causal.

        Returns:
            [s, b, 2h d], in ``query``'s dtype.
        """
        length, batch = query.shape[:2]
        heads = softmax_attention(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            causal=self.causal,
            softmax_scale=self.softmax_scale,
        )
        heads = self._normalise(heads)
        return heads.to(query.dtype).transpose(0, 1).reshape(length, batch, -1)
