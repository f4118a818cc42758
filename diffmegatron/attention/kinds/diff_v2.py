"""DIFF V2 (Ye et al., January 2026): one call of softmax attention, and lambda per token and head.

    lambda = sigmoid(X W_lambda)
    O_n = A_signal(n) - lambda_n A_noise(n // r)

X is the input of the attention, [tokens, hidden_size]. W_lambda is [hidden_size, signal heads], and
lambda_n is column n of lambda. A_i is the output of softmax attention of query head i, and O_n the
output of signal head n. r is the number of signal heads per noise head; the authors use r = 1. All
heads are counted from 0: signal head n is query head signal(n) = n + n // r, and noise head m is
query head noise(m) = m (r + 1) + r. DIFF V2 has no headwise norm and no lambda_init.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from diffmegatron.section import Size

from .layer import Context, FusedHead, Heads, Layer, Parameter, Rows, numbered
from .output_gate import OutputGate, with_gate
from .qk_norm import QKNorm

if TYPE_CHECKING:
    from torch import Tensor


class DiffV2(QKNorm, OutputGate):
    """Differential attention with h = ``num_heads`` signal heads and h / r noise heads of width d.

    A key-value head has one key and one value of width d, as in softmax attention. r is
    ``signal_per_noise``.
    """

    kind: Literal["diff_v2"] = "diff_v2"
    signal_per_noise: Size = Field(default=1, description="signal heads per noise head")

    title: ClassVar[str] = "Diff Transformer V2"

    @property
    def ratio(self) -> int:
        """Number r of signal heads per noise head."""
        return self.signal_per_noise

    @property
    def heads(self) -> Heads:
        """Layout of the heads in ``linear_qkv``: one block per key-value head.

        A block has groups of query heads, and then the key and the value. A group has r signal
        heads, and then their noise head.
        """
        signal = self.num_heads // self.num_kv_heads
        rows: Rows = (("q", signal + signal // self.ratio), ("k", 1), ("v", 1))
        return with_gate(self, Heads(self.head_dim, self.num_kv_heads, rows, signal))

    @property
    @override
    def matrices(self) -> tuple[FusedHead, ...]:
        """Matrices q1 of the signal heads, q2 of the noise heads, k and v, and g with a gate."""
        _, *others = self.heads.rows
        groups = self.num_heads // self.num_kv_heads // self.ratio
        queries = (("q1",) * self.ratio + ("q2",)) * groups
        return numbered((*queries, *(name for name, count in others for _ in range(count))))

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return W_lambda, [num_heads, hidden_size] and sharded by heads, and those of `super`."""
        shape = (self.num_heads, hidden_size)
        projection = Parameter("lambda_proj", shape, "matrix", "matrix", sharded=True)
        return (*super().parameters(hidden_size), projection)

    @override
    def from_hidden(self, layer: Layer, hidden: "Tensor") -> "Tensor":
        """Return X W_lambda as [s, b, signal heads of this rank]."""
        import torch

        logits = layer.project("lambda_proj", hidden)
        layer.observe("lambda", logits, torch.sigmoid)
        return logits

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Return O_n = A_signal(n) - lambda_n A_noise(n // r), [b, s, heads of this rank, d]."""
        assert from_hidden is not None
        heads = context.softmax_attention(query, key, value)
        return context.subtract_noise(heads, from_hidden, sigmoid=True)
