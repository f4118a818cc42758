"""DIFF V2 (Ye et al., January 2026): one call of softmax attention, and lambda per token and head.

    lambda = sigmoid(X W_lambda)
    O_n = A_signal(n) - lambda_n A_noise(n // r)

X is the input of the attention, [tokens, hidden_size]. W_lambda is [hidden_size, signal heads], and
lambda_n is column n of lambda. A_i is the output of softmax attention of query head i, and O_n the
output of signal head n. r is the number of signal heads per noise head; the authors use r = 1. All
heads are counted from 0: signal head n is query head signal(n) = n + n // r, and noise head m is
query head noise(m) = m (r + 1) + r. DIFF V2 has no headwise norm and no lambda_init.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from typing_extensions import override

from diffmegatron.attention.kernels.costs import FLOAT32
from diffmegatron.section import Size

from . import hugging_face as hf
from .kind import AttentionKind, Kernels
from .layer import Context, Heads, Layer, Parameter, Rows
from .softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor


class DiffV2(AttentionKind):
    """Differential attention with h = ``num_heads`` signal heads and h / r noise heads of width d.

    A key-value head has one key and one value of width d, as in softmax attention. r is
    ``signal_per_noise``.
    """

    kind: Literal["diff_v2"] = "diff_v2"
    signal_per_noise: Size = 1

    title: ClassVar[str] = "Diff Transformer V2"
    model_types: ClassVar[tuple[str, ...]] = ("diff_v2",)
    reads_hidden: ClassVar[bool] = True

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
        return Heads(self.head_dim, self.num_kv_heads, rows, signal)

    def baseline(self) -> Softmax:
        """Return softmax attention with one head per signal head."""
        return Softmax(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return W_lambda, stored as [num_heads, hidden_size] and sharded by signal heads."""
        shape = (self.num_heads, hidden_size)
        return (Parameter("lambda_proj", shape, "matrix", "matrix", sharded=True),)

    @override
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        inputs, core = kernels.softmax_bytes(self.heads)
        # The subtraction saves lambda, and the outputs of all query heads. The output projection
        # saves the difference.
        core += kernels.element * self.heads.query_channels + FLOAT32 * self.num_heads
        return inputs + kernels.element * self.heads.output_channels, core

    def gate(self, layer: Layer, hidden: "Tensor") -> "Tensor":
        """Return sigmoid(X W_lambda) as [s, b, signal heads of this rank], in float32 or wider."""
        import torch

        logits = layer.project("lambda_proj", hidden)
        lambda_ = logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
        layer.observe("lambda", lambda_)
        return lambda_

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        """Return O_n = A_signal(n) - lambda_n A_noise(n // r), [b, s, heads of this rank, d]."""
        from diffmegatron.attention.kernels.api import subtract_noise

        assert gate is not None
        heads = context.softmax_attention(query, key, value)
        return subtract_noise(heads, lambda_=gate)

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return this package's class DiffV2ForCausalLM and the keys of its configuration."""
        config = hf.head_keys(self.heads) | {"signal_per_noise": self.signal_per_noise}
        return hf.HuggingFace("diff_v2", "DiffV2ForCausalLM", config, remote_code=True)

    @classmethod
    @override
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        # num_attention_heads in the configuration counts signal and noise heads together.
        ratio = config["signal_per_noise"]
        return cls(
            num_heads=config["num_attention_heads"] // (ratio + 1) * ratio,
            signal_per_noise=ratio,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
        )

    @override
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        shape = (self.num_heads, hidden_size)
        return [
            hf.qkv(ours, theirs, self.heads, hidden_size),
            hf.output(ours, theirs, self.heads, hidden_size),
            hf.same(f"{ours}.lambda_proj", f"{theirs}.lambda_proj.weight", shape),
        ]

    @override
    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        groups = maps.unflatten(0, (-1, self.ratio + 1))
        signal, noise = groups.split((self.ratio, 1), dim=1)
        lambda_ = attention.lambda_proj(hidden).float().sigmoid().T.unflatten(0, (-1, self.ratio))
        return (signal - lambda_.unsqueeze(-1) * noise).flatten(0, 1)

    @property
    @override
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        r = self.ratio
        return tuple((n + n // r, n // r * (r + 1) + r) for n in range(self.num_heads))
