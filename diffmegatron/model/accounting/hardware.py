"""Speed, memory and bandwidth of GPUs, from NVIDIA's data sheets."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """Data-sheet values of a GPU model.

    Attributes:
        peak_flops: peak of dense bf16 matrix products in FLOP/s, without structured sparsity.
        memory_gib: nominal memory in GiB.
        memory_bandwidth: memory bandwidth in bytes/s.
        link_bandwidth: bandwidth to the other GPUs of the same node, in bytes/s per direction.
    """

    peak_flops: float
    memory_gib: float
    memory_bandwidth: float
    link_bandwidth: float


# Source: NVIDIA's data sheets of A100 80GB, H100, H200 and HGX B200. If a data sheet lists FLOP/s
# with sparsity, or link bandwidth as the sum of both directions, this table has half the value.
# Each key is a part of the name that CUDA reports, and `find_accelerator` uses the first match. The
# key "H100" must come after "H100 PCIe" and "H100 NVL", because these names also contain "H100".
ACCELERATORS = {
    "H100 PCIe": Accelerator(756e12, 80, 2.0e12, 300e9),
    "H100 NVL": Accelerator(835e12, 94, 3.9e12, 300e9),
    "A100": Accelerator(312e12, 80, 2.0e12, 300e9),
    "H100": Accelerator(989e12, 80, 3.35e12, 450e9),
    "H200": Accelerator(989e12, 141, 4.8e12, 450e9),
    "B200": Accelerator(2250e12, 180, 8.0e12, 900e9),
}


def find_accelerator(device_name: str) -> Accelerator | None:
    """Return the data-sheet values of a GPU, or None for an unknown GPU.

    Args:
        device_name: name that CUDA reports, such as ``NVIDIA H100 80GB HBM3``.
    """
    return next((gpu for name, gpu in ACCELERATORS.items() if name in device_name), None)
