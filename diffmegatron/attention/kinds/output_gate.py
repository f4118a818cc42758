"""The key ``output_gate``: a sigmoid gate of the heads' outputs before the output projection."""

from typing import Literal

from pydantic import Field

from .kind import AttentionKind
from .layer import OUTPUT_GATE, Heads, Parameter


class OutputGate(AttentionKind):
    """A kind whose layer can multiply the outputs of its heads by sigmoid(X W_g).

    X is the normalised input of the layer, [tokens, hidden_size]. With ``elementwise``, W_g has a
    column for each output channel, as in Qwen3-Next; its transpose is the rows "g" of
    ``linear_qkv``. With ``headwise``, it has a column for each head (arXiv 2505.06708); its
    transpose is the parameter ``output_gate``, [num_heads, hidden_size]. The layer applies the
    gate.
    """

    output_gate: Literal["elementwise", "headwise"] | None = Field(
        default=None, description="sigmoid gate of each output channel, or of each head's output"
    )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the matrix of a headwise gate, sharded by heads, and the parameters of `super`."""
        others = super().parameters(hidden_size)
        if self.output_gate != "headwise":
            return others
        shape = (self.num_heads, hidden_size)
        return (Parameter(OUTPUT_GATE, shape, "matrix", "matrix", sharded=True), *others)


def with_gate(kind: OutputGate, heads: Heads) -> Heads:
    """Return the layout ``heads``, with the logits of an elementwise gate if the kind has one."""
    return heads.gated() if kind.output_gate == "elementwise" else heads
