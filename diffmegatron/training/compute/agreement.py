"""Agreement of all ranks on a step's loss, gradient norm and flags, by one small all-reduce."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from diffmegatron.optim.guard import Guard, StepDecision
from diffmegatron.parallel.parallel_state import ParallelState


@dataclass(frozen=True)
class Agreement:
    """Values of a step after their reduction over all ranks; they are equal on every rank.

    Attributes:
        loss: loss of the step, the maximum over the ranks; infinite if the loss of at least one
            rank is not finite.
        gradient_norm: gradient norm of the step, the maximum over the ranks; infinite if the norm
            of at least one rank is not finite.
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

    The loss and the norm are already reduced within process groups, but the results of two groups
    may differ in the last bit. All ranks need equal values: if some ranks applied a step and others
    did not, their weights would diverge.

    This function waits for the device, because it reads the result on the CPU. This costs nothing
    extra: the training loop reads the loss of every step on the CPU in any case.

    Args:
        loss: 0-dim float32.
        gradient_norm: 0-dim float32 or a number.
        stop: whether this rank must stop.
        writing: whether this rank is still writing its checkpoint file.
        parallel_state: parallel layout, and this rank's place in it.
    """
    flags = torch.tensor([stop, writing], dtype=torch.float32, device=parallel_state.device)
    norm = torch.as_tensor(gradient_norm, dtype=torch.float32, device=parallel_state.device)
    numbers = torch.cat([torch.stack([loss.float(), norm]), flags])
    # Replace NaN, because the maximum of NaN and a number depends on the communication library.
    numbers = torch.where(numbers.isfinite(), numbers, torch.inf)
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    agreed = numbers.tolist()
    return Agreement(agreed[0], agreed[1], bool(agreed[2]), bool(agreed[3]))


class StepCheck:
    """Callback of the optimizer step that decides whether the weights are updated.

    It reduces the step's values over all ranks, and then calls the guard against loss spikes.

    Args:
        guard: guard of the run, which decides whether the step is applied.
        agree_on: function that reduces the step's values over all ranks, given the gradient norm.
    """

    def __init__(self, guard: Guard, agree_on: Callable[[Tensor], Agreement]) -> None:
        self._guard, self._agree_on = guard, agree_on
        self._result: tuple[Agreement, StepDecision] | None = None

    def allow(self, gradient_norm: Tensor) -> bool:
        """Return whether the optimizer may update the weights.

        Every rank must call this method once per step.

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
