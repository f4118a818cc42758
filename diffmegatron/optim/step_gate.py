"""A gate before AdamW's update that can refuse a step once the gradient norm is known.

DeepSpeed's optimizers reduce, compute the norm, clip and update in one call. Inside it they call
the given optimizer when the norm is known and nothing has changed yet. Refusing the step there
needs no additional pass, collective or synchronization.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from diffmegatron.optim.partition import Partition


class Gate:
    """Caller of ``allow``, once per step for all parameter groups together.

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
    """AdamW with a gate for each step, and with weight decay of single rows.

    Attributes:
        gate: returns whether the step is applied.
        decaying_rows: views of the rows that decay, by flat master tensor, for parameters with
            frozen rows.
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


def held_norms(
    partition: Partition, network: torch.nn.Module, device: torch.device
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Return the parameters whose gradients this rank holds before a step, and the norms.

    The norms are [n] float32 on ``device``, computed in one pass without synchronization.
    Offloading may have left some gradients in host memory.
    """
    held = [*_on_parameters(network), *partition.gradients()]
    if not held:
        return [], torch.zeros(0, device=device)
    norms = torch._foreach_norm([gradient for _, gradient in held])
    on_device = [norm.float().to(device, non_blocking=True) for norm in norms]
    return [parameter for parameter, _ in held], torch.stack(on_device)


def accumulated_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient that ZeRO 1 accumulates for a parameter; its location varies by dtype."""
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
