"""A kind with an export: softmax attention with a trained gain for each head.

The export multiplies the gains into the output projection of a Llama, and a hook writes their mean
to the log. docs/variants.md explains the rules of weights.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffmegatron import Hook, register_hook
from diffmegatron.attention.kinds import register
from diffmegatron.attention.kinds.layer import Constant, Context, Layer, Parameter
from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.hf.kinds import WeightRule, register_export
from diffmegatron.hf.kinds.softmax import SoftmaxExport

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron import Run


@register
class Gained(Softmax):
    """Softmax attention whose heads have trained gains."""

    kind: Literal["gained"] = "gained"

    title: ClassVar[str] = "Transformer with gains"

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the gains besides the parameters of softmax attention."""
        gains = Parameter(
            "gains", (self.num_heads,), Constant(1.0), "norm", float32=True, sharded=True
        )
        return (*super().parameters(hidden_size), gains)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Multiply the heads of softmax attention by their gains."""
        heads = super().forward(layer, context, query, key, value, from_hidden)
        return heads * layer.parameter("gains")[:, None].to(heads)  # [b, s, heads, d]


@register_export(Gained)
class GainedExport(SoftmaxExport):
    """A Llama whose output projection contains the gains."""

    model_types = ()  # an import of a Llama gives softmax attention

    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[WeightRule]:
        """Return the rules of a Llama's attention, with the gains in that of the output."""
        *rules, output = super().rules(ours, theirs, layer=layer, step=step)
        count, d = self.kind.num_heads, self.kind.head_dim

        def fold(proj: "Tensor", gains: "Tensor") -> tuple["Tensor", ...]:
            return (proj.float() * gains.float().repeat_interleave(d),)

        def unfold(proj: "Tensor") -> tuple["Tensor", ...]:
            return proj, proj.new_ones(count)

        folded = {**output.ours, f"{ours}.gains": (count,)}
        return [*rules, WeightRule(folded, output.theirs, fold, unfold)]


@register_hook
class RecordGain(Hook):
    """Record the mean of all gains after each step."""

    def after_step(self, run: "Run") -> None:
        """Write the mean to metrics.jsonl."""
        named = run.network.named_parameters()
        means = [float(gains.detach().mean()) for name, gains in named if name.endswith("gains")]
        run.write_metrics({"my/gain": sum(means) / len(means)})
