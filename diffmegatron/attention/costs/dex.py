"""Costs of DEX: those of softmax attention, and of the differential term of the selected heads."""

from typing_extensions import override

from diffmegatron.attention.costs.costs import Costs, register_costs
from diffmegatron.attention.costs.layer_run import LayerRun
from diffmegatron.attention.kinds.dex import Dex
from diffmegatron.attention.kinds.selected_heads import Unselected, assumed_heads


@register_costs(Dex)
class DexCosts(Costs[Dex]):
    """Means over all layers, because layers can have different numbers of selected heads."""

    @property
    def _selected_per_layer(self) -> float:
        selected = self.kind.selected_heads
        if isinstance(selected, Unselected):
            return assumed_heads(self.kind.num_heads)
        return sum(map(len, selected)) / len(selected)

    def own_products(self, hidden_size: int) -> float:
        """Return the multiply-adds per token and layer of O W_D."""
        return self._selected_per_layer * self.kind.head_dim**2

    @override
    def saved_bytes(self, run: LayerRun) -> tuple[float, float]:
        inputs, core = super().saved_bytes(run)
        # The differential term saves a copy of the selected heads' O.
        saved = self._selected_per_layer * self.kind.head_dim
        if not self.kind.headwise_norm and not run.copies_softmax_output:
            # `super` counts O once, for the kernel and the output projection. With the term, the
            # output projection saves O' instead.
            saved += self.kind.heads.query_channels
        return inputs, core + run.element * saved
