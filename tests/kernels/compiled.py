"""Compiles the Triton kernels for a GPU that is not there, and reads what they use."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from diffmegatron.attention.kernels import triton_config
from diffmegatron.attention.kernels.triton_forward import forward_kernel
from diffmegatron.attention.kernels.triton_key_value import key_value_kernel
from diffmegatron.attention.kernels.triton_query import query_kernel

TRITON_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
KERNELS = {
    "forward": (forward_kernel, triton_config.forward_blocks),
    "key_value": (key_value_kernel, triton_config.key_value_blocks),
    "query": (query_kernel, triton_config.query_blocks),
}
FLOATS = ("scale", "scale_log2", "norm_eps", "norm_scale")


class Usage(NamedTuple):
    """What ptxas gave a kernel: bytes of stack (spills), bytes of shared memory, and its PTX."""

    stack: int
    shared: int
    ptx: str


def compile_kernel(
    name: str, capability: int, dtype: torch.dtype, head_dim: int, one_pass: bool = False
) -> Usage:
    """Compile in the configuration that `triton_config` chooses; causal, both maps."""
    kernel, choose_blocks = KERNELS[name]
    tma = triton_config.use_tma(dtype, divmod(capability, 10))
    blocks = choose_blocks(head_dim, dtype, tma)
    constants = {
        "width": head_dim,
        "M": blocks.M,
        "N": blocks.N,
        "D": triton.next_power_of_2(head_dim),
        "MAPS": 2,
        "NORM": False,
        "ONE_PASS": one_pass,
        "CAUSAL": True,
        "DOCUMENTS": False,
        "TMA": tma,
        "ACCUMULATE": tl.float32,
        "INTERPRETED": False,
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {
        argument: "constexpr"
        if argument in constants
        else _type(argument, TRITON_NAMES[dtype], constants, one_pass)
        for argument in kernel.arg_names
    }
    index = kernel.arg_names.index
    # Pointers and strides are multiples of 16 at every launch, as the wrapper sees to.
    aligned = {
        (index(argument),): [["tt.divisibility", 16]]
        for argument, kind in signature.items()
        if kind.startswith("*") or argument.startswith("stride")
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, {(index(k),): v for k, v in constants.items()}, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": blocks.num_warps, "num_stages": blocks.num_stages},
    )
    return Usage(_stack(compiled.asm["cubin"]), compiled.metadata.shared, compiled.asm["ptx"])


def _type(argument: str, element: str, constants: dict, one_pass: bool) -> str:
    if argument in ("q1", "q2", "k1", "k2", "v", "grad"):
        if not constants["TMA"]:
            return f"*{element}"
        rows = constants["N"] if argument in ("k1", "k2", "v") else constants["M"]
        width = constants["D"] * (2 if argument in ("v", "grad") else 1)
        return f"tensordesc<{element}[1,1,{rows},{width}]>"
    if argument in ("dq1_ptr", "dq2_ptr") and one_pass:
        block = f"[1,1,{constants['D']},{constants['M']}]"
        return f"tensordesc<fp32{block}>" if constants["TMA"] else "*fp32"
    if re.fullmatch(r"(out2?|normed|d[qk][12]|dv)_ptr", argument):
        return f"*{element}"
    if re.search(r"(start|stop)_ptr$", argument):
        return "*i32"
    if argument.endswith("_ptr"):
        return "*fp32"
    return "fp32" if argument in FLOATS else "i32"


def _stack(cubin: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
    (stack,) = re.findall(r"STACK:(\d+)", listing.stdout)
    return int(stack)
