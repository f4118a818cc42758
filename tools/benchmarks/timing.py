"""Timing of a call, and a description of the machine, for all benchmarks."""

import time
from collections.abc import Callable
from importlib import metadata, util
from typing import TypeVar

import torch

from diffmegatron.measurements.machine import cpu_name

# GPU clock cycles for which the GPU waits before a timed call. They take about a millisecond, which
# is longer than the CPU needs to launch any timed call.
HEAD_START_CYCLES = 2_000_000

Result = TypeVar("Result")


def timed(function: Callable[[], Result], device: str) -> tuple[float, Result]:
    """Call a function, and return the seconds that it took and its result.

    On "cuda" the seconds are the time between two events on the GPU. In training the CPU launches
    kernels ahead of the GPU, so the GPU does not wait between kernels. To get the same effect here,
    the GPU waits before the first event while the CPU launches all kernels of the call. Without
    this wait, the time would include pauses between short kernels.
    """
    if device != "cuda":
        start = time.perf_counter()
        result = function()
        return time.perf_counter() - start, result
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    before.record()
    result = function()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3, result


def default_device() -> str:
    """Return "cuda" if torch can use a GPU, otherwise "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe_machine(device: str) -> dict[str, str | int]:
    """Return the CPU, the GPU, the number of threads and the versions of the attention libraries.

    Args:
        device: "cuda" or "cpu", the device of the measurements. On "cpu" the GPU is "none".
    """
    packages = {
        name: metadata.version(name)
        for name in ("torch", "triton", "flash-attn", "flex-head-fa")
        if util.find_spec(name.replace("-", "_"))
    }
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    return {"cpu": cpu_name(), "threads": torch.get_num_threads(), "gpu": gpu, **packages}
