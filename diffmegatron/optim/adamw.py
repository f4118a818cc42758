"""AdamW with a gate that can refuse a step once the gradient norm is known.

One call of DeepSpeed's optimizers reduces the gradients, computes their norm, clips them and
updates the weights. For the update, DeepSpeed calls :class:`GatedAdamW`. The norm is known at
that point, and no weight or moment has changed. Refusing the step there needs no additional pass,
collective or synchronization.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.schema import Recipe
from diffmegatron.model.network import Network
from diffmegatron.optim.parameter_groups import parameter_groups
from diffmegatron.optim.partition import Partition


class Gate:
    """The decision about one step, which is made once for all parameter groups.

    Attributes:
        answer: result of ``allow``; None before the call.
    """

    def __init__(self, zero_optimizer: Any, allow: Callable[[Tensor], bool]) -> None:
        self._zero_optimizer, self._allow = zero_optimizer, allow
        self.answer: bool | None = None

    def __call__(self) -> bool:
        """Return the result of ``allow``, which is called the first time only."""
        if self.answer is None:
            self.answer = self._allow(self._zero_optimizer._global_grad_norm)
        return self.answer


class GatedAdamW(torch.optim.AdamW):
    """AdamW with a gate for each step, and with weight decay of some rows of a parameter.

    Attributes:
        gate: returns whether the step is applied.
        decaying_rows: trained rows of parameters that also have frozen rows. The keys are the flat
            master tensors, and the values are views into them.
    """

    gate: Callable[[], bool]
    decaying_rows: Mapping[Tensor, list[Tensor]]

    def step(self, closure: Any = None) -> Any:
        """Update one parameter group if the gate allows it."""
        if not self.gate():
            return None
        for group in self.param_groups:
            rows = [row for flat in group["params"] for row in self.decaying_rows.get(flat, ())]
            if rows and group["row_decay"]:
                torch._foreach_mul_(rows, 1 - group["lr"] * group["row_decay"])
        return super().step(closure)


def create_adamw(network: Network, recipe: Recipe) -> GatedAdamW:
    """Return the optimizer of a recipe for the trained parameters of this rank's network."""
    optimizer = recipe.optimizer
    return GatedAdamW(
        parameter_groups(network, recipe),
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )


def decaying_rows(partition: Partition, network: torch.nn.Module) -> dict[Tensor, list[Tensor]]:
    """Return the trained rows of partly frozen parameters that this rank holds.

    The rows are views into the flat master tensors, by which they are keyed.
    """
    found: dict[Tensor, list[Tensor]] = {}
    for parameter in network.parameters():
        held = partition.range_of(parameter) if hasattr(parameter, "trained_ranges") else None
        if held is None:
            continue
        numel = held.where.stop - held.where.start
        for begin, end in parameter.trained_ranges:  # type: ignore[attr-defined]
            first, last = max(begin - held.start, 0), min(end - held.start, numel)
            if first < last:
                views = found.setdefault(held.flat, [])
                views.append(held.flat.data[held.where][first:last])
    return found
