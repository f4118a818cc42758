"""What the ranks must know of each other at every step, in one small all-reduce."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from diffmegatron.optim.guard import Guard, StepDecision
from diffmegatron.parallel.parallel_state import ParallelState


@dataclass(frozen=True)
class Agreement:
    """The same on every rank.

    Attributes:
        loss: of the step; infinite where it is not finite on any rank.
        gradient_norm: likewise.
        stop: whether any rank was asked to stop.
        writing: whether any rank still writes its part of a checkpoint.
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
    """Take the greatest of every rank's values.

    The loss and the norm are reduced already, but by groups whose sums may differ in the last
    bit, and ranks that decide differently on a step would diverge. Reading the loss is the one
    wait for the device here, which a run that knows its loss makes anyway.

    Args:
        loss: 0-dim float32.
        gradient_norm: 0-dim float32 or a number.
        stop: whether this rank was asked to stop.
        writing: whether this rank still writes.
        parallel_state: the ranks.
    """
    flags = torch.tensor([stop, writing], dtype=torch.float32, device=parallel_state.device)
    norm = torch.as_tensor(gradient_norm, dtype=torch.float32, device=parallel_state.device)
    numbers = torch.cat([torch.stack([loss.float(), norm]), flags])
    # The greatest of NaN and a number is either, depending on the library.
    numbers = torch.where(numbers.isfinite(), numbers, torch.inf)
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    agreed = numbers.tolist()
    return Agreement(agreed[0], agreed[1], bool(agreed[2]), bool(agreed[3]))


class AgreedDecision:
    """The agreement on a step and the guard's decision on it, made when the engine asks."""

    def __init__(self, guard: Guard, agree_on: Callable[[Tensor], Agreement]) -> None:
        self._guard, self._agree_on = guard, agree_on
        self._result: tuple[Agreement, StepDecision] | None = None

    def allow(self, gradient_norm: Tensor) -> bool:
        """Whether the optimizer may go on; once per step."""
        agreed = self._agree_on(gradient_norm)
        decision = self._guard.decide(agreed.loss, agreed.gradient_norm)
        self._result = agreed, decision
        return decision.applied

    @property
    def result(self) -> tuple[Agreement, StepDecision]:
        """What was agreed and decided."""
        assert self._result is not None, "the engine steps without asking"
        return self._result
