"""DIFF V2 (Ye et al., January 2026): one call of softmax attention, and lambda per token and head.

The output of signal head n is

    O_n = A_signal(n) - lambda_n * A_noise(n // r)

A_i is the output of softmax attention for query head i. signal(n) is the index of signal head n
among the query heads, and noise(m) the index of noise head m. Lambda is sigmoid(x W_lambda), where
x is the layer's input. There are r signal heads per noise head. V2 has neither a headwise norm nor
lambda_init.

The query heads are in groups of r signal heads, followed by their noise head. All heads of a group
must share a key-value head. In grouped-query attention, consecutive query heads share one, so the
heads of a group are consecutive. The authors use r = 1. Motif-3 uses a larger r with latent
attention, which is not implemented here.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from typing_extensions import override

from diffmegatron.attention.kernels.registry import SOFTMAX
from diffmegatron.attention.variants import hugging_face as hf
from diffmegatron.attention.variants.base import (
    FLOAT32,
    Context,
    Kernels,
    Layer,
    Parameter,
    Variant,
)
from diffmegatron.attention.variants.projection_heads import Heads, Rows
from diffmegatron.attention.variants.softmax import Softmax
from diffmegatron.section import Size

if TYPE_CHECKING:
    from torch import Tensor


class DiffV2(Variant):
    """Differential attention with h signal heads and h / r noise heads of width d.

    h is ``num_heads``, r is ``signal_per_noise``, and d is ``head_dim``. The result has one output
    of width d per signal head. A key-value head has one key and one value of width d, as in softmax
    attention. The key-value cache is therefore as large as that of :meth:`baseline`.
    """

    kind: Literal["diff_v2"] = "diff_v2"
    signal_per_noise: Size = 1

    title: ClassVar[str] = "Diff Transformer V2"
    model_types: ClassVar[tuple[str, ...]] = ("diff_v2",)
    reads_hidden: ClassVar[bool] = True

    @property
    def ratio(self) -> int:
        """Number of signal heads per noise head."""
        return self.signal_per_noise

    @property
    def noise_heads(self) -> int:
        """Number of noise heads, h / r."""
        return self.num_heads // self.signal_per_noise

    @property
    def heads(self) -> Heads:
        """Layout of the heads in the rows of ``linear_qkv``.

        There is one block per key-value head. A block has the query heads that share this key-value
        head, then its key and its value. The query heads are in groups of r signal heads, followed
        by their noise head.
        """
        signal = self.num_heads // self.num_kv_heads
        queries = signal + self.noise_heads // self.num_kv_heads
        rows: Rows = (("q", queries), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, signal)

    def baseline(self) -> Softmax:
        """Return softmax attention with as many heads as this kind has signal heads.

        The number of key-value heads and the width of a head are the same.
        """
        return Softmax(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return W_lambda, stored as [num_heads, hidden_size] and sharded by signal heads."""
        shape = (self.num_heads, hidden_size)
        return (Parameter("lambda_proj", shape, "matrix", "matrix", sharded=True),)

    def products(self) -> int:
        """Return the multiply-adds per (query, key) pair, summed over signal and noise heads."""
        return 2 * self.heads.query_channels

    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        """Return the bytes per token that softmax attention and the subtraction save.

        :meth:`.base.Variant.saved_bytes` defines the two numbers.
        """
        heads, element, backend = self.heads, kernels.element, SOFTMAX[kernels.backend]
        queries = element * heads.query_channels
        projected = queries + kernels.softmax_keys(heads, backend) + element * heads.output_channels
        core: float = queries + FLOAT32 * (heads.queries + self.num_heads)
        if kernels.communication is None:
            # v is a view of the output of the fused q, k and v projection. The view keeps the whole
            # output in memory, so the unrotated q and k are counted in addition to the rotated
            # ones.
            projected += queries + element * heads.key_channels
        is_copied = kernels.communication in ("all_gather", "ulysses")
        if is_copied or (kernels.has_mask and backend.saves_bias):
            # Here the subtraction saves a copy of the kernel's output, and the kernel saves the
            # output itself.
            core += queries
        return projected, core

    def gate(self, layer: Layer, hidden: "Tensor") -> "Tensor":
        """Return sigmoid(x W_lambda) as [s, b, signal heads of this rank], in float32 or wider."""
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
        """Return O_n = A_signal(n) - lambda_n * A_noise(n // r) of every signal head n.

        The shape is [b, s, signal heads of this rank, d].
        """
        from diffmegatron.attention.kernels.api import subtract_noise

        assert gate is not None
        lambda_ = gate
        heads = context.softmax_attention(query, key, value)
        return subtract_noise(heads, lambda_)

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return the description of this package's own model class, whose code is exported too."""
        return hf.HuggingFace(
            "diff_v2",
            "DiffV2ForCausalLM",
            {
                "num_attention_heads": self.heads.queries,
                "signal_per_noise": self.signal_per_noise,
                "num_key_value_heads": self.heads.keys,
                "head_dim": self.head_dim,
            },
            remote_code=True,
        )

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
    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        # A group is r signal heads and then their noise head.
        groups = maps.unflatten(0, (-1, self.ratio + 1))
        signal, noise = groups.split((self.ratio, 1), dim=1)
        lambda_ = attention.lambda_proj(hidden).float().sigmoid().T.unflatten(0, (-1, self.ratio))
        return (signal - lambda_.unsqueeze(-1) * noise).flatten(0, 1)

    @property
    @override
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        # A group is r signal heads and then their noise head.
        r = self.ratio
        return tuple(
            (n // r * (r + 1) + n % r, n // r * (r + 1) + r) for n in range(self.num_heads)
        )

    @override
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        # The exported class has the heads of each projection in the order that hf.qkv produces.
        shape = (self.num_heads, hidden_size)
        return [
            hf.qkv(ours, theirs, self.heads, hidden_size),
            hf.output(ours, theirs, self.heads, hidden_size),
            hf.same(f"{ours}.lambda_proj", f"{theirs}.lambda_proj.weight", shape),
        ]
