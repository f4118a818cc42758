"""Times of calls: the device's time, with a cold cache, all candidates in turn."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from diffmegatron.measurements.records import Timing
from diffmegatron.tuning.trials import Trial

# GPU clock cycles for which the GPU waits before a timed call. They take about a millisecond, which
# is longer than the CPU needs to launch any timed call.
HEAD_START_CYCLES = 2_000_000
# Bytes that are written before a timed call on a GPU, more than any L2 cache holds.
_CACHE_BYTES = 1 << 28
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 30
# Candidates that take this many times the fastest one's time are timed in two rounds only.
_SLOW = 3.0
_SLOW_ROUNDS = 2

Result = TypeVar("Result")


def timed(function: Callable[[], Result], device: str) -> tuple[float, Result]:
    """Call a function, and return the seconds that it took and its result.

    On "cuda" the seconds are the time between two events on the GPU. In training the CPU launches
    kernels ahead of the GPU, so the GPU does not wait between kernels. To get the same effect here,
    the GPU waits before the first event while the CPU launches all kernels of the call. Without
    this wait, the time would include pauses between short kernels.

    On a CPU with one thread, the seconds are the CPU time of this process, which other processes
    disturb less.
    """
    if device != "cuda":
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        result = function()
        return clock() - start, result
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    before.record()
    result = function()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3, result


def clear_cache(device: str) -> None:
    """Overwrite the L2 cache of a GPU, because a step's other operations do the same."""
    if device == "cuda":
        _buffer().zero_()


@cache
def _buffer() -> Tensor:
    return torch.empty(_CACHE_BYTES, dtype=torch.uint8, device="cuda")


def time_in_turn(
    samples: Mapping[str, Callable[[], Sequence[float]]], seconds: float
) -> dict[str, tuple[Timing, ...]]:
    """Call every function in turn, and return the timings of the numbers that it returns.

    The first round warms up. Rounds follow for ``seconds``, but at least 3 and at most 30. A
    function that takes 3 times as long as the fastest one takes part in two rounds only.
    """
    taken: dict[str, list[Sequence[float]]] = {name: [] for name in samples}
    for sample in samples.values():
        sample()
    end = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        fastest = min((_total(each) for each in taken.values() if each), default=0.0)
        for name, sample in samples.items():
            is_slow = number >= _SLOW_ROUNDS and _total(taken[name]) > _SLOW * fastest
            if not is_slow:
                taken[name].append(sample())
    return {name: tuple(map(timing_of, zip(*each, strict=True))) for name, each in taken.items()}


def passes(trial: Trial, backend: str, grad: Tensor) -> Callable[[], tuple[float, float]]:
    """Return a function that runs a trial, and returns the seconds of forward and backward pass."""
    leaves = {name: x.detach().requires_grad_() for name, x in trial.inputs.items()}
    device = grad.device.type

    def sample() -> tuple[float, float]:
        with trial.sums():
            clear_cache(device)
            forward, out = timed(lambda: trial.call(leaves, backend), device)
            clear_cache(device)
            inputs = list(leaves.values())
            backward, _ = timed(lambda: torch.autograd.grad(out, inputs, grad), device)
        return forward, backward

    return sample


def time_call(function: Callable[[], object], device: str, seconds: float) -> Timing:
    """Call a function repeatedly for ``seconds``, and return its timing."""

    def sample() -> tuple[float]:
        clear_cache(device)
        return (timed(function, device)[0],)

    (timing,) = time_in_turn({"": sample}, seconds)[""]
    return timing


def _total(taken: Sequence[Sequence[float]]) -> float:
    return statistics.median(map(sum, taken))


def timing_of(values: Sequence[float]) -> Timing:
    """Return the median of measured seconds and the range of their middle half."""
    # A clock of microseconds may show 0 for a very short call.
    median = max(statistics.median(values), 1e-9)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (median,) * 3
    return Timing(median=median, spread=high - low)
