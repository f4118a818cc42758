"""Launches the Triton kernels on a GPU that is not there, and reads what the compiler made of them.

A driver stands in for CUDA's: it names the chip, and remembers what would have been launched. All
before that is the real thing: the calls of `triton_attention`, what Triton specialises on in their
arguments, and ptxas.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

# Bytes of shared memory that one block may have.
SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024}


class Usage(NamedTuple):
    """What ptxas made of a kernel.

    Attributes:
        stack: bytes of stack: registers that did not fit.
        spills: accesses to it from the first to the last matrix product, so within the loops.
        shared: bytes of shared memory.
        products: multiply-adds of all matrix products, each loop counted once.
        has_wgmma: whether it multiplies with Hopper's warpgroup instructions.
        is_serialized: whether each of these waits for the one before (ptxas's C7510 to C7514).
    """

    stack: int
    spills: int
    shared: int
    products: int
    has_wgmma: bool
    is_serialized: bool


class StandInDriver(DriverBase):
    """Says that the current device is a GPU of a compute capability; launches do nothing."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self._capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": SHARED_LIMIT[capability]},
            load_binary=lambda *_: (None, None, 0, 0, 1024),
        )

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> "StandInDriver":
        """Triton keeps what it compiled by device: a new one each time compiles everything."""
        return self

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> None:
        raise NotImplementedError

    def get_benchmarker(self) -> Callable[..., object]:
        raise NotImplementedError

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *_: None


@contextmanager
def pretended_gpu(capability: int) -> Iterator[dict[str, Any]]:
    """Within, Triton compiles for this capability; yields the compiled kernels by name."""
    launched: dict[str, Any] = {}
    stand_in = StandInDriver(capability)

    def remember(*, fn: Any, compile: dict[str, Any], **_: object) -> None:
        kernels = fn.jit_function.device_caches[stand_in][0]
        launched[fn.jit_function.__name__] = kernels[compile["key"]]

    driver = triton.runtime.driver
    driver_before = driver._active
    hook_before = triton.knobs.runtime.jit_post_compile_hook
    driver.set_active(stand_in)
    triton.knobs.runtime.jit_post_compile_hook = remember
    try:
        yield launched
    finally:
        triton.knobs.runtime.jit_post_compile_hook = hook_before
        driver._active = driver_before


def usage_of(kernel: Any) -> Usage:
    """What a compiled kernel takes, from ptxas itself, with the options that Triton gives it."""
    arch = kernel.metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(kernel.asm["ptx"])
        assembled = _run(
            triton.knobs.nvidia.ptxas.path, "-lineinfo", "-v", "--regAllocOptLevel=2",
            f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", str(ptx), "-o", str(cubin),
        )  # fmt: skip
        listing = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)).stdout
    (stack,) = re.findall(r"(\d+) bytes stack frame", assembled.stderr)
    instructions = re.findall(r"\b(HGMMA\.\w+|HMMA\.\w+|LDL|STL)\b", listing)
    products = [_multiply_adds(name, kernel.metadata.num_warps) for name in instructions]
    where = [index for index, size in enumerate(products) if size]
    between = instructions[where[0] : where[-1]] if where else []
    return Usage(
        stack=int(stack),
        spills=sum(name in ("LDL", "STL") for name in between),
        shared=kernel.metadata.shared,
        products=sum(products),
        has_wgmma="wgmma" in kernel.asm["ptx"],
        is_serialized="serialized" in assembled.stderr,
    )


def _multiply_adds(instruction: str, warps: int) -> int:
    """Of all warps that execute it together; 0 for another instruction."""
    shape = re.fullmatch(r"HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.(\d\d)(\d)(\d+)", instruction)
    if shape is None:
        return 0
    rows, columns, depth = (int(size) for size in shape.groups() if size is not None)
    # A warpgroup is four warps.
    return rows * columns * depth * (warps // 4 if instruction.startswith("HGMMA") else warps)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)
