"""Speed, memory and bandwidth of GPUs, from NVIDIA's data sheets."""

from dataclasses import dataclass

# Assumed number of GPUs in a node.
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Accelerator:
    """Data-sheet values of a GPU model.

    Attributes:
        peak_flops: dense bf16 FLOP/s, without structured sparsity.
        memory_bandwidth: bytes/s.
        link_bandwidth: bytes/s per direction to the other GPUs of the same node.
        capability: compute capability (major, minor).
    """

    peak_flops: float
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float
    capability: tuple[int, int]


# NVIDIA's data sheets of A100 80GB, H100, H200 and HGX B200. If a sheet lists FLOP/s with sparsity,
# or the link bandwidth of both directions, this table has half the value. A key is a part of the
# name that CUDA reports. The first match counts, so "H100" must come after the longer names.
ACCELERATORS = {
    "H100 PCIe": Accelerator(756e12, 80, 2.0e12, 300e9, (9, 0)),
    "H100 NVL": Accelerator(835e12, 94, 3.9e12, 300e9, (9, 0)),
    "A100": Accelerator(312e12, 80, 2.0e12, 300e9, (8, 0)),
    "H100": Accelerator(989e12, 80, 3.35e12, 450e9, (9, 0)),
    "H200": Accelerator(989e12, 141, 4.8e12, 450e9, (9, 0)),
    "B200": Accelerator(2250e12, 180, 8.0e12, 900e9, (10, 0)),
}


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the values of a GPU from the name that CUDA reports; None for an unknown GPU."""
    return next((gpu for name, gpu in ACCELERATORS.items() if name in device_name), None)
