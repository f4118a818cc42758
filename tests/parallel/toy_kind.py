"""New kind of attention, added only through the public registry; docs/variants.md refers to it.

The kind is ordinary attention with a gain per head. A tensor-parallel rank has the gains of its own
heads. As a script, this file runs the command ``diffmegatron`` with the new kind registered.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffmegatron.attention.kinds import register
from diffmegatron.attention.kinds.hugging_face import HuggingFace, WeightRule
from diffmegatron.attention.kinds.kind import (
    FLOAT32,
    AttentionKind,
    Constant,
    Context,
    Kernels,
    Layer,
    Parameter,
)
from diffmegatron.attention.kinds.layer import Heads
from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@register
class Gained(AttentionKind):
    """Ordinary attention; the output of each head is multiplied by a gain that starts at 1."""

    kind: Literal["gained"] = "gained"

    title: ClassVar[str] = "Transformer with gains"

    @property
    def heads(self) -> Heads:
        return self.baseline().heads

    def baseline(self) -> Softmax:
        return Softmax(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        ones = Constant(1.0)
        return (Parameter("gains", (self.num_heads,), ones, "norm", float32=True, sharded=True),)

    def products(self) -> int:
        return self.baseline().products()

    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        projected, core = self.baseline().saved_bytes(kernels)
        return projected + FLOAT32 * self.heads.output_channels, core

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        return context.softmax_attention(query, key, value) * layer.parameter("gains")[:, None]

    def hugging_face(self, hidden_size: int) -> HuggingFace:
        raise UserError(
            "model.attention.kind 'gained' cannot be exported: no class of Hugging Face has gains"
        )

    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[WeightRule]:
        return []


# The kind must be registered before ``main`` reads a recipe, so this import comes last.
from diffmegatron.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
