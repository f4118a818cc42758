"""The duration of each phase of a step, and the rank on which it is longest."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import distributed
from torch.profiler import record_function

from diffmegatron.parallel.parallel_state import ParallelState

PHASES = ("data", "forward_backward", "update")
# The first two phases are a rank's own work; in "update" it waits for other ranks.
_OWN = 2
# Machines of one kind differ by less than this factor.
_SLOWER = 1.5


class PhaseClock:
    """Sums of this rank's seconds in each phase, by the host's clock.

    On a GPU the first phases only enqueue work. The phase ``update`` reads a value, so it includes
    the wait for the device.

    Attributes:
        slow_ranks: ranks of the last report whose own work took more than 1.5 times the median.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = 0
        self.slow_ranks: tuple[int, ...] = ()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside to the phase, and mark it in a profile."""
        started = time.perf_counter()
        with record_function(phase):
            yield
        self._seconds[phase] += time.perf_counter() - started

    def step_done(self) -> None:
        """Count a step; the report divides the sums by the number of steps."""
        self._steps += 1

    def report(self, parallel_state: ParallelState) -> dict[str, float]:
        """Return the slowest rank of each phase since the last report; called on all ranks.

        Returns:
            ``perf/PHASE_seconds_slowest``, the mean seconds per step on the slowest rank, and
            ``perf/PHASE_slowest_rank``.
        """
        mine = torch.tensor(
            [self._seconds[phase] / max(1, self._steps) for phase in PHASES],
            device=parallel_state.device,
        )
        every = [torch.empty_like(mine) for _ in range(parallel_state.world_size)]
        distributed.all_gather(every, mine)
        self._seconds.clear()
        self._steps = 0
        if parallel_state.pipeline_size == 1:  # Pipeline stages differ in their work.
            self.slow_ranks = slow([sum(each[:_OWN].tolist()) for each in every])
        seconds, ranks = torch.stack(every).max(dim=0)
        report = {}
        for phase, most, rank in zip(PHASES, seconds.tolist(), ranks.tolist(), strict=True):
            report[f"perf/{phase}_seconds_slowest"] = most
            report[f"perf/{phase}_slowest_rank"] = rank
        return report


def slow(seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks that take more than 1.5 times the median of all."""
    usual = statistics.median(seconds)
    return tuple(rank for rank, each in enumerate(seconds) if each > _SLOWER * usual)
