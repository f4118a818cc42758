"""Agreement of all ranks on a step's loss, gradient norm and flags, by one small all-reduce."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from diffmegatron.optim.guard import Guard, StepDecision
from diffmegatron.parallel.parallel_state import ParallelState


@dataclass(frozen=True)
class Agreement:
    """Values of a step, reduced over all ranks, so equal on every rank.

    Attributes:
        loss, gradient_norm: maximum over the ranks; infinite if the value of a rank is not finite.
        stop: whether at least one rank must stop.
        writing: whether at least one rank is still writing its checkpoint file.
    """

    loss: float
    gradient_norm: float
    stop: bool
    writing: bool


def agree(
    loss: Tensor,
    gradient_norm: Tensor | float,
    *,
    stop: bool,
    writing: bool,
    parallel_state: ParallelState,
) -> Agreement:
    """Return the maximum of each value over all ranks; every rank must call this function.

    The results of two process groups may differ in the last bit. If only some ranks then applied a
    step, the weights would diverge. The function waits for the device.

    Args:
        loss: 0-dim float32.
        gradient_norm: 0-dim float32 or a number.
        stop: whether this rank must stop.
        writing: whether this rank is still writing its checkpoint file.
    """
    flags = torch.tensor([stop, writing], dtype=torch.float32, device=parallel_state.device)
    norm = torch.as_tensor(gradient_norm, dtype=torch.float32, device=parallel_state.device)
    numbers = torch.cat([torch.stack([loss.float(), norm]), flags])
    # The maximum of NaN and a number depends on the communication library.
    numbers = torch.where(numbers.isfinite(), numbers, torch.inf)
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    agreed = numbers.tolist()
    return Agreement(agreed[0], agreed[1], bool(agreed[2]), bool(agreed[3]))


class StepCheck:
    """Callback of the optimizer step that decides whether the weights are updated."""

    def __init__(self, guard: Guard, agree_on: Callable[[Tensor], Agreement]) -> None:
        self._guard, self._agree_on = guard, agree_on
        self._result: tuple[Agreement, StepDecision] | None = None

    def allow(self, gradient_norm: Tensor) -> bool:
        """Return whether the optimizer may update the weights; call once per step on every rank.

        Args:
            gradient_norm: gradient norm before clipping, 0-dim float32.
        """
        agreed = self._agree_on(gradient_norm)
        decision = self._guard.decide(agreed.loss, agreed.gradient_norm)
        self._result = agreed, decision
        return decision.applied

    @property
    def result(self) -> tuple[Agreement, StepDecision]:
        """Agreement and guard's decision of the step, available after :meth:`allow`."""
        assert self._result is not None, "the engine's step did not call allow"
        return self._result
