"""AdamW with a gate, a callback that can refuse a step after the gradient norm is computed.

DeepSpeed's step computes the gradient norm, clips the gradients and calls :class:`GatedAdamW`. The
gate runs first, before weights and moments change.
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
    """The decision whether one step is applied, made once for all parameter groups.

    Args:
        zero_optimizer: DeepSpeed's optimizer, from which the gradient norm is read.
        allow: function of the gradient norm (0-dim) that returns whether the step is applied.

    Attributes:
        answer: result of ``allow``; None until ``allow`` is called.
    """

    def __init__(self, zero_optimizer: Any, allow: Callable[[Tensor], bool]) -> None:
        self._zero_optimizer, self._allow = zero_optimizer, allow
        self.answer: bool | None = None

    def __call__(self) -> bool:
        """Return whether the step is applied."""
        if self.answer is None:
            self.answer = self._allow(self._zero_optimizer._global_grad_norm)
        return self.answer


class GatedAdamW(torch.optim.AdamW):
    """AdamW that can skip a step, and can apply weight decay to only some rows of a parameter.

    Attributes:
        gate: function that returns whether the present step is applied.
        decaying_rows: flat master tensor (float32) -> views of the trained rows of those parameters
            that also have frozen rows. Weight decay must not change the frozen rows.
    """

    gate: Callable[[], bool]
    decaying_rows: Mapping[Tensor, list[Tensor]]

    def step(self, closure: Any = None) -> Any:
        """Update the weights of ``self.param_groups`` if the gate allows it.

        DeepSpeed may call this once per parameter group, with only that group in ``param_groups``.
        """
        if not self.gate():
            return None
        for group in self.param_groups:
            rows = [row for flat in group["params"] for row in self.decaying_rows.get(flat, ())]
            if rows and group["row_decay"]:
                torch._foreach_mul_(rows, 1 - group["lr"] * group["row_decay"])
        return super().step(closure)


def create_adamw(network: Network, recipe: Recipe) -> GatedAdamW:
    """Return the optimizer for the trained parameters of this rank.

    Its attributes ``gate`` and ``decaying_rows`` must be set before the first step.
    """
    optimizer = recipe.optimizer
    return GatedAdamW(
        parameter_groups(network, recipe),
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )


def decaying_rows(partition: Partition, network: torch.nn.Module) -> dict[Tensor, list[Tensor]]:
    """Return this rank's trained rows of parameters that also have frozen rows.

    The result maps each flat master tensor with such rows to the views of the rows in it.
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
