"""How long each phase of a step takes, and on which rank longest."""

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
# Those in which a rank works by itself; in the last one it waits for the others.
_OWN = 2
# What the slowest of equal machines differ by from the usual one is less.
_SLOWER = 1.5


class PhaseClock:
    """Adds up this rank's seconds in each phase.

    By the host's clock: on a GPU a phase is the time to enqueue its work, and the waiting falls
    into the phase that reads a value, ``update``.

    Attributes:
        slow_ranks: of the last report, those whose own work took 1.5 times the median of all.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = 0
        self.slow_ranks: tuple[int, ...] = ()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside as the phase's, under whose name a profile has it too."""
        started = time.perf_counter()
        with record_function(phase):
            yield
        self._seconds[phase] += time.perf_counter() - started

    def step_done(self) -> None:
        """Another step is in the sums."""
        self._steps += 1

    def report(self, parallel_state: ParallelState) -> dict[str, float]:
        """Of each phase since the last report, with all ranks: the slowest rank, its seconds.

        Returns:
            ``perf/PHASE_seconds_slowest``, the mean over the steps on the rank where it is
            greatest, and ``perf/PHASE_slowest_rank``.
        """
        mine = torch.tensor(
            [self._seconds[phase] / max(1, self._steps) for phase in PHASES],
            device=parallel_state.device,
        )
        every = [torch.empty_like(mine) for _ in range(parallel_state.world_size)]
        distributed.all_gather(every, mine)
        self._seconds.clear()
        self._steps = 0
        if parallel_state.pipeline_size == 1:  # where every rank has as much to do
            self.slow_ranks = slow([sum(each[:_OWN].tolist()) for each in every])
        seconds, ranks = torch.stack(every).max(dim=0)
        report = {}
        for phase, most, rank in zip(PHASES, seconds.tolist(), ranks.tolist(), strict=True):
            report[f"perf/{phase}_seconds_slowest"] = most
            report[f"perf/{phase}_slowest_rank"] = rank
        return report


def slow(seconds: Sequence[float]) -> tuple[int, ...]:
    """The ranks that take 1.5 times the median of all."""
    usual = statistics.median(seconds)
    return tuple(rank for rank, each in enumerate(seconds) if each > _SLOWER * usual)
