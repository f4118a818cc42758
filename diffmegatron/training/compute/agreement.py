"""Agreement of all ranks on a step, by one small all-reduce."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from diffmegatron.optim.guard import Guard, StepDecision
from diffmegatron.parallel.parallel_state import ParallelState


@dataclass(frozen=True)
class Agreement:
    """Values that are the same on every rank.

    Attributes:
        loss: loss of the step; infinite if it is not finite on any rank.
        gradient_norm: gradient norm of the step; infinite if it is not finite on any rank.
        stop: whether any rank must stop.
        writing: whether any rank still writes its file of a checkpoint.
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
    """Reduce the values of all ranks to their maximum.

    Loss and norm are already reduced, but within groups whose sums may differ in the last bit, and
    ranks that decide differently on a step would diverge. Reading the result waits for the device;
    the training loop reads the loss of every step anyway.

    Args:
        loss: 0-dim float32.
        gradient_norm: 0-dim float32 or a number.
        stop: whether this rank must stop.
        writing: whether this rank still writes its file of a checkpoint.
        parallel_state: layout of the ranks.
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
    """Callback of the engine's step: agree with all ranks, then let the guard decide."""

    def __init__(self, guard: Guard, agree_on: Callable[[Tensor], Agreement]) -> None:
        self._guard, self._agree_on = guard, agree_on
        self._result: tuple[Agreement, StepDecision] | None = None

    def allow(self, gradient_norm: Tensor) -> bool:
        """Return whether the optimizer may update the weights; called once per step."""
        agreed = self._agree_on(gradient_norm)
        decision = self._guard.decide(agreed.loss, agreed.gradient_norm)
        self._result = agreed, decision
        return decision.applied

    @property
    def result(self) -> tuple[Agreement, StepDecision]:
        """Agreement on the step, and the guard's decision."""
        assert self._result is not None, "the engine's step did not call allow"
        return self._result
