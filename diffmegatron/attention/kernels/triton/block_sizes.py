"""Block sizes of the Triton kernels, as plain functions that need no GPU.

The sizes were chosen from the output of Triton's compiler for sm_90 and sm_80
(docs/design/kernels.md), and none has been timed on a GPU. `diffmegatron tune` times them beside
the sizes of :func:`other_configurations`. `head_dim` is the width of a query.
"""

from enum import Enum
from typing import Any

import torch

from ..configuration import BlockSizes, Configuration
from ..costs import is_one_pass

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


class ChipClass(Enum):
    """A class of chips and dtypes, which determines block sizes and how tiles are loaded.

    HOPPER stands for 16-bit dtypes on Hopper, and loads through tensor descriptors (TMA). LARGE and
    SMALL load through pointers. A thread block needs at most 163 KiB of shared memory
    with the block sizes of LARGE, and at most 99 KiB with SMALL.
    """

    HOPPER = "hopper"
    LARGE = "large"
    SMALL = "small"


def target_of(dtype: torch.dtype, capability: tuple[int, int], head_dim: int = 128) -> ChipClass:
    """Return the target for a chip of this compute capability, and this dtype and head_dim.

    Only 16-bit dtypes on Hopper (9.x) use tensor descriptors, up to a head_dim of 128. Above, the
    blocks are smaller than the 64 rows of Hopper's matrix instructions. With descriptors for fp32
    tiles the backward kernels would spill kilobytes of registers. On Blackwell (10.x) Triton's
    pipeliner aborts the process if a loop prefetches tiles through descriptors and contains the
    inline assembly of `tiles.opaque`.
    """
    if capability[0] == 9 and dtype in SIXTEEN_BITS and head_dim <= 128:
        return ChipClass.HOPPER
    is_large = capability in ((8, 0), (8, 7)) or capability[0] in (9, 10)
    return ChipClass.LARGE if is_large else ChipClass.SMALL


def target_for(q: torch.Tensor) -> ChipClass:
    """Return the target for queries like `q`, `[..., head_dim]`.

    CPU tensors run in Triton's interpreter, where blocks of all sizes fit.
    """
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else (8, 0)
    return target_of(q.dtype, capability, q.shape[-1])


def forward_blocks(head_dim: int, dtype: torch.dtype, target: ChipClass) -> BlockSizes:
    """Return the block sizes of `forward_kernel`."""
    if dtype not in SIXTEEN_BITS:
        return BlockSizes(32, 32, 4, 1)
    if head_dim > 128:
        return BlockSizes(32, 32, 8, 2)
    if target is ChipClass.HOPPER:
        return BlockSizes(128, 64, 8, 3, licm=False)
    return BlockSizes(64, 64, 4 if head_dim <= 64 else 8, 2)


def dkdv_blocks(head_dim: int, dtype: torch.dtype, target: ChipClass, one_pass: bool) -> BlockSizes:
    """Return the block sizes of `dkdv_kernel`, which with `one_pass` also computes dQ."""
    is_cramped = target is ChipClass.SMALL and head_dim > 64
    if dtype not in SIXTEEN_BITS:
        return BlockSizes(16, 16, 2, 1) if is_cramped else BlockSizes(16, 32, 4, 1)
    if head_dim > 128:
        return BlockSizes(16, 32, 8, 1)
    if target is ChipClass.HOPPER:
        # Above head_dim 64 the one-pass form spills registers with either value of `licm`. With
        # True, the loop accesses the stack less often.
        is_full = one_pass and head_dim > 64
        return BlockSizes(128 if head_dim <= 64 else 64, 64, 8, 3, licm=is_full)
    if is_cramped:
        return BlockSizes(32, 32, 4, 1)
    return BlockSizes(32, 64, 8, 2 if head_dim <= 64 else 1)


def dq_blocks(
    head_dim: int, dtype: torch.dtype, target: ChipClass, grouped: bool = False
) -> BlockSizes:
    """Return the block sizes of `dq_kernel`; `grouped` if signal heads share a noise head."""
    if dtype not in SIXTEEN_BITS:
        return BlockSizes(32, 32, 4, 1)
    if head_dim > 128:
        return BlockSizes(32, 32, 8, 1)
    if target is ChipClass.HOPPER:
        # A program for one of two maps has a branch for each map. The compiler gives the two
        # branches separate memory, and with three stages d = 128 would need 240 KiB.
        is_large = grouped and head_dim > 64
        return BlockSizes(128, 64 if head_dim <= 64 else 32, 8, 2 if is_large else 3, licm=False)
    return BlockSizes(64, 32, 4, 2) if head_dim <= 64 else BlockSizes(32, 64, 4, 1)


def other_configurations(
    q: torch.Tensor, *, grouped: bool, deterministic: bool
) -> list[Configuration]:
    """Return the configurations that `tune` tries beside the default one, for queries like `q`.

    Each differs from it in one way: by the other form of the backward pass, unless gradients must
    be summed in a fixed order, or by half as many query rows in the blocks of one kernel. More of
    these blocks fit a multiprocessor at once.
    """
    head_dim, dtype, target = q.shape[-1], q.dtype, target_for(q)
    one_pass = is_one_pass(head_dim, deterministic)
    kernels = {
        "forward": forward_blocks(head_dim, dtype, target),
        "dkdv": dkdv_blocks(head_dim, dtype, target, one_pass),
    }
    if not one_pass:
        kernels["dq"] = dq_blocks(head_dim, dtype, target, grouped)
    found = [] if deterministic else [Configuration(one_pass=not one_pass)]
    for kernel, blocks in kernels.items():
        if blocks.M > 16:
            # In the kernel of dK and dV the warps divide the keys.
            warps = blocks.num_warps if kernel == "dkdv" else blocks.num_warps // 2
            sizes: Any = (blocks.M // 2, blocks.N, warps, blocks.num_stages)
            found.append(Configuration(**{kernel: sizes}))
    return found
