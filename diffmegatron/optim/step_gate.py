"""Refuse an optimizer step once DeepSpeed knows the gradient norm, before AdamW's update.

DeepSpeed's optimizers reduce, take the norm, clip and update in one call. The one object of ours
they reach inside it is the optimizer they were given, when the norm is known and nothing has
changed yet: there the step can still be refused, at the price of no other pass, collective or
wait for the device than DeepSpeed's own.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from diffmegatron.optim.partition import Partition


class Gate:
    """Asks once whether a step is applied, however many parameter groups it has.

    Attributes:
        answer: what ``allow`` said; None before it was asked.
    """

    def __init__(self, zero_optimizer: Any, allow: Callable[[Tensor], bool]) -> None:
        self._zero_optimizer, self._allow = zero_optimizer, allow
        self.answer: bool | None = None

    def __call__(self) -> bool:
        """The answer, asking for it the first time."""
        if self.answer is None:
            self.answer = self._allow(self._zero_optimizer._global_grad_norm)
        return self.answer


class GatedAdamW(torch.optim.AdamW):
    """AdamW that updates only if its gate lets it, and of some parameters lets only rows decay.

    Attributes:
        gate: whether the step is applied.
        decaying_rows: views into a flat master tensor of the rows that decay, where not all do.
    """

    gate: Callable[[], bool]
    decaying_rows: Mapping[Tensor, list[Tensor]]

    def step(self, closure: Any = None) -> Any:
        """One parameter group's update, or nothing."""
        if not self.gate():
            return None
        for group in self.param_groups:
            rows = [row for flat in group["params"] for row in self.decaying_rows.get(flat, ())]
            if rows and group["row_decay"]:
                torch._foreach_mul_(rows, 1 - group["lr"] * group["row_decay"])
        return super().step(closure)


def decaying_rows(partition: Partition, network: torch.nn.Module) -> dict[Tensor, list[Tensor]]:
    """What this rank holds of the trained rows of parameters of which others are frozen.

    By flat master tensor, views into it.
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


def held_norms(
    partition: Partition, network: torch.nn.Module, device: torch.device
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """The parameters whose gradient this rank holds before a step, and the norms, [n] float32.

    On ``device``, without waiting for it; one pass over the gradients, some of which offloading
    may have left in the host's memory.
    """
    held = [*_on_parameters(network), *partition.gradients()]
    if not held:
        return [], torch.zeros(0, device=device)
    norms = torch._foreach_norm([gradient for _, gradient in held])
    on_device = [norm.float().to(device, non_blocking=True) for norm in norms]
    return [parameter for parameter, _ in held], torch.stack(on_device)


def accumulated_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Where DeepSpeed's ZeRO 1 keeps a parameter's gradient: it depends on the dtype."""
    for name in ("_hp_grad", "grad_accum", "grad"):
        gradient = getattr(parameter, name, None)
        if gradient is not None:
            return gradient
    return None


def _on_parameters(network: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    for parameter in network.parameters():
        gradient = accumulated_gradient(parameter)
        if gradient is not None:
            yield parameter, gradient
