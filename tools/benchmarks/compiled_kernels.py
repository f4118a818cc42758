"""Compile the Triton kernels for a GPU that is not present, and analyze the machine code.

A stand-in for Triton's CUDA driver reports the GPU's compute capability and does nothing at a
launch. Everything before the launch is real: the calls of `kernels.triton`, Triton's specialization
on their arguments, and ptxas.
"""

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.cache import get_cache_manager

from diffmegatron.attention.kernels.api import HeadwiseNorm
from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.configuration import Configuration
from diffmegatron.attention.kernels.maps import QKV
from diffmegatron.attention.kernels.triton import block_sizes as triton_blocks
from diffmegatron.attention.kernels.triton import subtraction_kernel as subtraction
from diffmegatron.attention.kernels.triton import triton_attention
from diffmegatron.model.cross_entropy_kernel import cross_entropy

# Maximum bytes of shared memory per block, by compute capability.
SHARED_LIMIT = {
    **dict.fromkeys((80, 87), 163 * 1024),
    **dict.fromkeys((86, 89, 120, 121), 99 * 1024),
    **dict.fromkeys((90, 100, 103), 227 * 1024),
}


class Usage(NamedTuple):
    """Resources of a kernel compiled by ptxas.

    Attributes:
        stack: bytes of stack per thread, which holds spilled registers.
        spills: number of instructions in the machine code that access the stack between the first
            and the last matrix product. All products are in loops, so most of these instructions
            are in loops too.
        shared: bytes of shared memory per thread block.
        products: multiply-adds of all matrix products of a thread block; a loop counts as if it
            ran once.
        cycles: estimated cycles of Hopper's tensor cores for these products (`_cycles`).
        has_wgmma: whether the kernel uses Hopper's warpgroup instructions.
        is_serialized: whether each warpgroup instruction waits for the previous one (ptxas's
            warnings C7510 to C7514).
    """

    stack: int
    spills: int
    shared: int
    products: int
    cycles: float
    has_wgmma: bool
    is_serialized: bool


class StandInDriver(DriverBase):
    """Driver of a GPU with a given compute capability, whose launches do nothing."""

    def __init__(self, capability: int) -> None:
        super().__init__()
        self._capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": SHARED_LIMIT[capability]},
            load_binary=lambda *_: (None, None, 0, 0, 1024),
        )

    @classmethod
    def is_active(cls) -> bool:
        """Return True."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the type unchanged, because C++ launchers are not used."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the compilation target."""
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> "StandInDriver":
        """Return this driver, so that Triton does not reuse kernels compiled for another device."""
        return self

    def get_current_stream(self, device: object) -> int:
        """Return the default stream."""
        return 0

    # Triton's driver class declares the next two methods as abstract. Compiling calls neither.

    def get_active_torch_device(self) -> None:
        """Raise NotImplementedError: no torch device belongs to this GPU."""
        raise NotImplementedError("a simulated GPU has no torch device")

    def get_benchmarker(self) -> Callable[..., object]:
        """Raise NotImplementedError: launches do nothing, so their times have no meaning."""
        raise NotImplementedError("a simulated GPU runs nothing that could be timed")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher that does nothing."""
        return lambda *_: None


@contextmanager
def pretended_gpu(capability: int) -> Iterator[dict[str, Any]]:
    """Make Triton compile for a compute capability; yield a dict that collects kernels by name."""
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


def compile_launches(
    capability: int, dtype: torch.dtype, head_dim: int, *, one_pass: bool, variant: str = "plain"
) -> dict[str, Any]:
    """Compile a causal forward and backward pass, and return the kernels by name.

    Args:
        capability: compute capability of the GPU, a key of `SHARED_LIMIT`.
        dtype: dtype of queries, keys and values.
        head_dim: width of a head, d.
        one_pass: whether the backward pass computes dQ in the same kernel as dK and dV.
        variant: one of five. "plain": two maps with equally many heads, and one document. "norm"
            adds the headwise norm. "documents" packs two documents. "grouped" has four heads of the
            first map per head of the second, and the headwise norm. "softmax" has one map, and
            values as wide as queries.

    Returns:
        Compiled kernels by name, without the ending "_kernel".
    """
    length, heads = 512, 12
    target = triton_blocks.target_of(dtype, divmod(capability, 10), head_dim)

    def draw(columns: int, count: int = heads) -> Tensor:
        return torch.zeros(1, length, count, columns, dtype=dtype, requires_grad=True)

    q1, k1, k2, v = (draw(width) for width in (head_dim, head_dim, head_dim, 2 * head_dim))
    q2 = draw(head_dim, heads)
    if variant == "grouped":
        q2 = draw(head_dim, heads // 4)
        k1, k2, v = (x[:, :, :1] for x in (k1, k2, v))
    maps, lambda_, norm = QKV((q1, q2), (k1, k2), v), torch.tensor(0.5, requires_grad=True), None
    if variant == "softmax":
        maps, lambda_ = QKV((q1,), (k1,), v[..., :head_dim]), None
    if variant in ("norm", "grouped"):
        norm = HeadwiseNorm(torch.ones(2 * head_dim), 1e-5, 0.2)
    documents = torch.tensor([0, 7, length]) if variant == "documents" else None
    call = AttentionCall.checked(maps, lambda_, norm, softmax_scale=0.1, cu_seqlens=documents)
    configuration = Configuration(one_pass=one_pass)
    with pretended_gpu(capability) as kernels:
        out = triton_attention.attend(call, configuration, target)
        out.backward(torch.zeros_like(out))
    return {name.removesuffix("_kernel"): kernel for name, kernel in kernels.items()}


def compile_subtraction(capability: int, dtype: torch.dtype, head_dim: int) -> dict[str, Any]:
    """Compile the kernels of `subtract_noise` for logits, with four signal heads per noise head."""
    heads = torch.zeros(1, 512, 10, head_dim, dtype=dtype, requires_grad=True)
    logits = torch.zeros(1, 512, 8, dtype=dtype, requires_grad=True)
    with pretended_gpu(capability) as kernels:
        out = subtraction.subtract_noise(heads, logits, sigmoid=True)
        out.backward(torch.zeros_like(out))
    return {name.removesuffix("_kernel"): kernel for name, kernel in kernels.items()}


def compile_cross_entropy(capability: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile the kernels of the vocabulary's cross-entropy."""
    logits = torch.zeros(4, 100288, dtype=dtype, requires_grad=True)
    with pretended_gpu(capability) as kernels:
        losses, _ = cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
        losses.backward(torch.zeros(4))
    return {name.removesuffix("_kernel"): kernel for name, kernel in kernels.items()}


def usage_of(kernel: Any) -> Usage:
    """Return a compiled kernel's resources, which Triton's cache keeps.

    Without the cache, reading them takes a second or more.
    """
    content = kernel.asm["cubin"] + kernel.asm["ptx"].encode() + Path(__file__).read_bytes()
    cache = get_cache_manager(hashlib.sha256(content).hexdigest())
    file = cache.get_file("usage.json")
    if file is None:
        usage = _read_usage(kernel)
        file = cache.put(json.dumps(usage._asdict()), "usage.json", binary=False)
    return Usage(**json.loads(Path(file).read_text()))


def _read_usage(kernel: Any) -> Usage:
    """Read a compiled kernel's resources from its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        resources = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)).stdout
        listing = _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin)).stdout
    (stack,) = re.findall(r"STACK:(\d+)", resources)
    warps = kernel.metadata.num_warps
    found = re.findall(r"\b(HGMMA\.\w+|HMMA\.\w+|LDL|STL)\b[.\w]*([^;]*);", listing)
    products = [_multiply_adds(name, warps) for name, _ in found]
    where = [index for index, size in enumerate(products) if size]
    between = found[where[0] : where[-1]] if where else []
    has_wgmma = "wgmma" in kernel.asm["ptx"]
    return Usage(
        stack=int(stack),
        spills=sum(name in ("LDL", "STL") for name, _ in between),
        shared=kernel.metadata.shared,
        products=sum(products),
        cycles=sum(_cycles(*instruction) * warps / 4 for instruction in found),
        has_wgmma=has_wgmma,
        is_serialized=has_wgmma and _is_serialized(kernel),
    )


def _is_serialized(kernel: Any) -> bool:
    """Run ptxas again with Triton's options; return whether it warns that wgmma is serialized."""
    arch = kernel.metadata.target.arch
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(kernel.asm["ptx"])
        assembled = _run(
            get_ptxas(arch).path, "-lineinfo", "-v", "--regAllocOptLevel=2",
            f"--gpu-name=sm_{arch}a", str(ptx), "-o", str(cubin),
        )  # fmt: skip
    return "serialized" in assembled.stderr


def _multiply_adds(instruction: str, warps: int) -> int:
    """Return the multiply-adds of a matrix instruction in all warps; 0 for other instructions."""
    shape = re.fullmatch(r"HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.(\d\d)(\d)(\d+)", instruction)
    if shape is None:
        return 0
    rows, columns, depth = (int(size) for size in shape.groups() if size is not None)
    # HGMMA is an instruction of a warpgroup (four warps), HMMA of one warp.
    return rows * columns * depth * (warps // 4 if instruction.startswith("HGMMA") else warps)


def _cycles(instruction: str, operands: str) -> float:
    """Estimate the cycles of an instruction that four warps issue, with 16-bit operands.

    A warpgroup's wgmma multiplies a matrix of 64 x 16 elements by one of 16 x n elements. Its
    arithmetic takes n / 2 cycles, at 2048 multiply-adds per cycle and SM. Its operands are read
    from shared memory at 128 bytes per cycle. This takes n / 4 cycles for the second matrix, and 16
    cycles for the first matrix unless it is in registers. The estimate is the larger of the time
    for arithmetic and the time for reading.

    Products of single warps (HMMA), as in blocks of fewer than 64 rows, are assumed to be half as
    fast.
    """
    shape = re.fullmatch(r"HGMMA\.64x(\d+)x16", instruction)
    if shape is None:
        return _multiply_adds(instruction, warps=4) / 1024
    columns = int(shape[1])
    is_in_registers = re.match(r"\s*R\d+,\s*R\d+", operands) is not None
    return max(columns / 2, columns / 4 + (0 if is_in_registers else 16))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)
