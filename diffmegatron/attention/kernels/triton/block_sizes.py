"""Block sizes of the Triton kernels, as plain functions of the problem, callable without a GPU.

They were chosen to compile for sm_90 and sm_80 with the fewest spills in the loops and without a
product that two warps both compute, and to fit the other chips
(tests/kernels/test_triton_compile.py holds the figures). None has been timed on a GPU yet:
tools/benchmarks/tune_attention.py does that.
"""

from enum import Enum
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Rows of queries M and of keys N per block, and how the kernel is compiled.

    With tensor descriptors it takes three stages for loads to overlap with products: a block's
    loads are issued when its products are, and with two stages the next block waits for them.

    Attributes:
        licm: loop-invariant code motion: what does not change in the loops is computed before them
            and kept in registers, of which descriptors of shared tiles take several a tile.
    """

    M: int
    N: int
    num_warps: int
    num_stages: int
    licm: bool = True


SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class Target(Enum):
    """A class of chips that the kernels are compiled for.

    HOPPER loads 16-bit tiles through tensor descriptors; the others take plain pointers. LARGE
    chips have 163 KiB of shared memory for a block of threads, SMALL ones 99.
    """

    HOPPER = "hopper"
    LARGE = "large"
    SMALL = "small"


def target_of(dtype: torch.dtype, capability: tuple[int, int]) -> Target:
    """Return the target for a chip of this compute capability, SMALL for unknown ones.

    fp32 tiles through descriptors spill kilobytes in the backward. Blackwell (10.x) takes plain
    pointers: its pipeliner stops the process at `tiles.opaque` in a loop that loads ahead.
    """
    if capability[0] == 9 and dtype in SIXTEEN_BITS:
        return Target.HOPPER
    is_large = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    return Target.LARGE if is_large else Target.SMALL


def forward_blocks(head_dim: int, dtype: torch.dtype, target: Target) -> Blocks:
    """Return the blocks of `forward_kernel`."""
    if dtype not in SIXTEEN_BITS:
        return Blocks(32, 32, 4, 1)
    if target is Target.HOPPER:
        return Blocks(128, 64, 8, 3, licm=False)
    return Blocks(64, 64, 4 if head_dim <= 64 else 8, 2)


def dkdv_blocks(head_dim: int, dtype: torch.dtype, target: Target, one_pass: bool) -> Blocks:
    """Return the blocks of `dkdv_kernel` in one of its forms."""
    is_cramped = target is Target.SMALL and head_dim > 64
    if dtype not in SIXTEEN_BITS:
        return Blocks(16, 16, 2, 1) if is_cramped else Blocks(16, 32, 4, 1)
    if target is Target.HOPPER:
        # At d = 128 dQ does not fit beside dK and dV, whatever is kept.
        is_full = one_pass and head_dim > 64
        return Blocks(128 if head_dim <= 64 else 64, 64, 8, 3, licm=is_full)
    if is_cramped:
        return Blocks(32, 32, 4, 1)
    return Blocks(32, 64, 8, 2 if head_dim <= 64 else 1)


def dq_blocks(head_dim: int, dtype: torch.dtype, target: Target) -> Blocks:
    """Return the blocks of `dq_kernel`."""
    if dtype not in SIXTEEN_BITS:
        return Blocks(32, 32, 4, 1)
    if target is Target.HOPPER:
        return Blocks(128, 64 if head_dim <= 64 else 32, 8, 3, licm=False)
    return Blocks(64, 32, 4, 2) if head_dim <= 64 else Blocks(32, 64, 4, 1)
