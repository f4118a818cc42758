"""A kind of attention of your own: DIFF V1 with lambda = sigmoid(g) and no headwise norm.

g is a trained number per head. docs/variants.md explains the kind, and own_kind.yaml has such
layers.
"""

from typing import TYPE_CHECKING, ClassVar, Literal

from diffmegatron.attention.costs import Costs, Sizes, register_costs
from diffmegatron.attention.kinds import register
from diffmegatron.attention.kinds.layer import Constant, Context, Layer, Parameter
from diffmegatron.attention.kinds.two_maps import TwoMaps, split_maps

if TYPE_CHECKING:
    from torch import Tensor


@register
class HeadGated(TwoMaps):
    """Two softmax maps, of which the second is subtracted times the lambda of the head."""

    kind: Literal["head_gated"] = "head_gated"

    title: ClassVar[str] = "Diff Transformer with gated heads"

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return g of every head."""
        logits = Parameter(
            "gate_logits", (self.num_heads,), Constant(0.0), "lambda", float32=True, sharded=True
        )
        return (logits,)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Attend with each half of the value, whose width the queries do not have."""
        import torch

        q1, k1, q2, k2, v = split_maps(query, key, value)
        low, high = v.chunk(2, dim=-1)
        heads = context.softmax_attention(
            torch.cat([q1, q1, q2, q2], dim=2),
            torch.cat([k1, k1, k2, k2], dim=2),
            torch.cat([low, high, low, high], dim=2),
        )
        signal, noise = heads.unflatten(2, (2, 2, -1)).unbind(2)  # [b, s, halves, h, d]
        lambda_ = layer.parameter("gate_logits").sigmoid()
        layer.observe("lambda", lambda_)
        return (signal - lambda_[:, None].to(signal) * noise).transpose(2, 3).flatten(3)


@register_costs(HeadGated)
class HeadGatedCosts(Costs[HeadGated]):
    """The costs of a forward pass that attends with twice the heads of the projections."""

    def products(self) -> int:
        """Return the multiply-adds per pair of a query and a key."""
        return 2 * super().products()

    def kernel_sizes(self, element: int, keys: float) -> Sizes:
        """Return the sizes of the attention call."""
        sizes = super().kernel_sizes(element, keys)
        return sizes._replace(signal_heads=2 * sizes.signal_heads, kv_heads=2 * sizes.kv_heads)
