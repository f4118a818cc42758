"""softmax(Q K^T / sqrt(d)) V: the Transformer's attention, and the baseline of all kinds.

Q, K and V are [tokens, d] in each head, and d is ``head_dim``.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from .kind import AttentionKind
from .layer import HEAD_NORM, QKV_BIAS, Constant, Context, Heads, Layer, Parameter, Rows
from .output_gate import OutputGate, with_gate
from .qk_norm import QKNorm

if TYPE_CHECKING:
    from torch import Tensor


class Softmax(QKNorm, OutputGate):
    """Softmax attention; ``num_heads / num_kv_heads`` query heads share a key-value head.

    ``qkv_bias`` adds a bias to queries, keys and values (Qwen2). ``headwise_norm`` applies an
    RMSNorm to each head's output (Ye et al., ICLR 2025, table 6).
    """

    kind: Literal["softmax"] = "softmax"
    qkv_bias: bool = Field(default=False, description="biases of queries, keys and values (Qwen2)")
    headwise_norm: bool = Field(default=False, description="RMSNorm of each head's output")

    title: ClassVar[str] = "Transformer"

    @property
    def heads(self) -> Heads:
        """Layout of Megatron-core: a block has the queries of one key, this key and its value."""
        queries = self.num_heads // self.num_kv_heads
        rows: Rows = (("q", queries), ("k", 1), ("v", 1))
        return with_gate(self, Heads(self.head_dim, self.num_kv_heads, rows, queries))

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the bias of ``linear_qkv``, the gate and the norms' weights, if configured."""
        own = [*super().parameters(hidden_size)]
        if self.qkv_bias:
            channels = (self.heads.qkv_channels,)
            own.append(Parameter(QKV_BIAS, channels, Constant(0.0), "bias", sharded=True))
        if self.headwise_norm:
            weight = (self.head_dim,)
            own.append(Parameter(HEAD_NORM, weight, Constant(1.0), "norm", float32=True))
        return tuple(own)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Return softmax(Q K^T / sqrt(d)) V of this rank's heads, [b, s, heads, d].

        With ``headwise_norm``, return RMSNorm(softmax(Q K^T / sqrt(d)) V).
        """
        heads = context.softmax_attention(query, key, value)
        if not self.headwise_norm:
            return heads
        from diffmegatron.attention.kernels.api import HeadwiseNorm

        norm = HeadwiseNorm(layer.parameter(HEAD_NORM), layer.norm_eps, 1.0)
        # The axis order [s, b, ...] determines the last bits of the gradient of the norm's weight.
        # Earlier versions had this order, and their runs must resume to the same numbers.
        return norm.apply_to(heads.transpose(0, 1)).transpose(0, 1)


def transformer_of(kind: AttentionKind) -> Softmax:
    """Return softmax attention with as many output, key and value channels as a kind.

    A kind that extends softmax attention keeps its keys, such as ``qkv_bias``. All kinds keep
    ``window``, ``qk_norm`` and ``output_gate``.
    """
    # Twice a valid number of heads can exceed a recipe's limit, so skip the validation.
    if isinstance(kind, Softmax):
        shared = {name: getattr(kind, name) for name in Softmax.model_fields if name != "kind"}
        return Softmax.model_construct(**shared)
    heads = kind.heads
    return Softmax.model_construct(
        num_heads=heads.output_channels // heads.head_dim,
        num_kv_heads=heads.keys,
        head_dim=heads.head_dim,
        window=kind.window,
        qk_norm=isinstance(kind, QKNorm) and kind.qk_norm,
        output_gate=kind.output_gate if isinstance(kind, OutputGate) else None,
    )
