"""Export of DEX as the pretrained model's class, with the differential term in its weights."""

from typing import TYPE_CHECKING

from diffmegatron.attention.kinds.dex import (
    LAMBDA_LEARN,
    PROJECTION,
    Dex,
    annealed_lambda,
    selected_in,
)
from diffmegatron.hf.kinds import weight_rules as hf
from diffmegatron.hf.kinds.export import register_export
from diffmegatron.hf.kinds.softmax import SoftmaxExport

if TYPE_CHECKING:
    from torch import Tensor


@register_export(Dex)
class DexExport(SoftmaxExport):
    """The class of softmax attention, so no model type is imported as DEX."""

    model_types = ()
    kind: Dex

    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[hf.WeightRule]:
        """Return the rules that map a layer's attention weights to a plain Transformer and back.

        The export multiplies (I - lambda W_D) into the output projection, in float64. The weight of
        this projection is stored transposed, [hidden_size, heads * d]. The inverse rule sets W_D
        and lambda_learn to zero.
        """
        name, d = f"{ours}.linear_proj.weight", self.kind.head_dim

        def fold(weight: "Tensor", projection: "Tensor", learned: "Tensor") -> tuple["Tensor", ...]:
            by_head = weight.double().unflatten(1, (-1, d)).clone()
            lambda_ = annealed_lambda(self.kind.annealing_steps, layer, step, learned)
            change = lambda_.double() * projection.double()
            for head in selected_in(self.kind, layer):
                by_head[:, head] -= by_head[:, head] @ change.T
            return (by_head.flatten(1),)

        def unfold(weight: "Tensor") -> tuple["Tensor", ...]:
            return weight, weight.new_zeros(d, d), weight.new_zeros(1)

        rules = super().rules(ours, theirs, layer=layer, step=step)
        (output,) = (rule for rule in rules if name in rule.ours)
        folded = {
            **output.ours,
            f"{ours}.{PROJECTION}": (d, d),
            f"{ours}.{LAMBDA_LEARN}": (1,),
        }
        rules[rules.index(output)] = hf.WeightRule(folded, output.theirs, fold, unfold)
        return rules
