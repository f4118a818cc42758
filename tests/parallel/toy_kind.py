"""New kind of attention, added only through the public registry; docs/variants.md refers to it.

The kind is ordinary attention with a gain per head. A tensor-parallel rank has the gains of its own
heads. As a script, this file runs the command ``diffmegatron`` with the new kind registered.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffmegatron.attention.kinds import AttentionKind, register
from diffmegatron.attention.kinds.layer import Constant, Context, Heads, Layer, Parameter, Rows

if TYPE_CHECKING:
    from torch import Tensor


@register
class Gained(AttentionKind):
    """Ordinary attention; the output of each head is multiplied by a gain that starts at 1."""

    kind: Literal["gained"] = "gained"

    title: ClassVar[str] = "Transformer with gains"

    @property
    def heads(self) -> Heads:
        queries = self.num_heads // self.num_kv_heads
        rows: Rows = (("q", queries), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, queries)

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        ones = Constant(1.0)
        return (Parameter("gains", (self.num_heads,), ones, "norm", float32=True, sharded=True),)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        return context.softmax_attention(query, key, value) * layer.parameter("gains")[:, None]


# The kind must be registered before ``main`` reads a recipe, so this import comes last.
from diffmegatron.cli import main  # noqa: E402

if __name__ == "__main__":
    main()
