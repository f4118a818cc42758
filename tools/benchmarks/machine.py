"""A description of the machine, for all benchmarks."""

from importlib import metadata, util

import torch

from diffmegatron.measurements.machine import cpu_name


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
