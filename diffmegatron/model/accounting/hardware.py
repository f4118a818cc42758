"""Data-sheet figures of GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """Data-sheet figures of a GPU.

    Attributes:
        peak_flops: dense bf16 FLOP/s (no structured sparsity).
        memory_gib: nominal memory in GiB.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s to the other GPUs of its node, in each direction.
    """

    peak_flops: float
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float


# Source: NVIDIA's data sheets of A100 80GB, H100, H200 and HGX B200. They list most rates with
# sparsity, twice the dense rate, and link rates as the sum of both directions. Longer names come
# first, because "H100" also matches "H100 PCIe".
ACCELERATORS = {
    "H100 PCIe": Accelerator(756e12, 80, 2.0e12, 300e9),
    "H100 NVL": Accelerator(835e12, 94, 3.9e12, 300e9),
    "A100": Accelerator(312e12, 80, 2.0e12, 300e9),
    "H100": Accelerator(989e12, 80, 3.35e12, 450e9),
    "H200": Accelerator(989e12, 141, 4.8e12, 450e9),
    "B200": Accelerator(2250e12, 180, 8.0e12, 900e9),
}


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the GPU with CUDA's name, such as ``NVIDIA H100 80GB HBM3``; None if unknown."""
    return next((gpu for name, gpu in ACCELERATORS.items() if name in device_name), None)
