"""The duration of each phase of a step, and the slowest rank in each phase."""

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
# Slow ranks are found by the seconds of the first _OWN phases. "update" does not count, because all
# ranks wait for the slowest in it.
_OWN = 2
# Machines of the same kind differ by less than this factor.
_SLOWER = 1.5


class PhaseClock:
    """Clock of the host's seconds in each phase on this rank since the last report.

    GPU kernels that still run when "forward_backward" ends count in "update". ``slow_ranks`` has
    the ranks that :func:`slow` found in the last report; always empty with pipeline parallelism.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = 0
        self.slow_ranks: tuple[int, ...] = ()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time inside the context to a phase, and mark the phase in torch's profiles."""
        started = time.perf_counter()
        with record_function(phase):
            yield
        self._seconds[phase] += time.perf_counter() - started

    def step_done(self) -> None:
        """Count a step."""
        self._steps += 1

    def report(self, parallel_state: ParallelState) -> dict[str, float]:
        """Return metrics of the slowest rank in each phase; reset the clock. All ranks call this.

        At least one step must have been counted since the last report.

        The metrics of a phase are ``perf/PHASE_slowest_rank``, the number of the slowest rank, and
        ``perf/PHASE_seconds_slowest``, the mean seconds per step of that rank.
        """
        mine = torch.tensor(
            [self._seconds[phase] / self._steps for phase in PHASES],
            device=parallel_state.device,
        )
        every = [torch.empty_like(mine) for _ in range(parallel_state.world_size)]
        distributed.all_gather(every, mine)
        self._seconds.clear()
        self._steps = 0
        # Pipeline stages have different work, so a longer time does not show a slow rank.
        if parallel_state.pipeline_size == 1:
            self.slow_ranks = slow([sum(each[:_OWN].tolist()) for each in every])
        seconds, ranks = torch.stack(every).max(dim=0)
        report = {}
        for phase, most, rank in zip(PHASES, seconds.tolist(), ranks.tolist(), strict=True):
            report[f"perf/{phase}_seconds_slowest"] = most
            report[f"perf/{phase}_slowest_rank"] = rank
        return report


def slow(seconds: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks whose entry in ``seconds`` exceeds 1.5 times the median of all ranks."""
    usual = statistics.median(seconds)
    return tuple(rank for rank, each in enumerate(seconds) if each > _SLOWER * usual)
