"""Block sizes of the Triton kernels: a plain function of what is computed, callable anywhere.

Chosen by what compiles for sm_90 and sm_80 with the fewest spills in the loops and without a
product that two warps both compute (tests/kernels/test_triton_compile.py holds the figures); none
has been timed on a GPU yet: tools/tune_attention.py does that.
"""

from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Rows of queries M and of keys N per block, and how the kernel is compiled.

    With tensor descriptors it takes three stages for loads to overlap with products: a block's
    loads are issued when its products are, and with two stages the next block waits for them.
    """

    M: int
    N: int
    num_warps: int
    num_stages: int


HEAD_DIMS = (64, 96, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def use_tma(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Whether to load through tensor descriptors: 16-bit tiles on Hopper and later.

    fp32 tiles through descriptors spill kilobytes in the backward.
    """
    return capability >= (9, 0) and dtype in (torch.bfloat16, torch.float16)


def forward_blocks(head_dim: int, dtype: torch.dtype, tma: bool) -> Blocks:
    """Blocks of `forward_kernel`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Blocks(32, 32, 4, 1)
    if tma:
        return Blocks(128, 64, 8, 3)
    return Blocks(64, 64, 4 if head_dim <= 64 else 8, 2)


def key_value_blocks(head_dim: int, dtype: torch.dtype, tma: bool) -> Blocks:
    """Blocks of `key_value_kernel`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Blocks(16, 32, 4, 1)
    if not tma:
        return Blocks(32, 64, 8, 2 if head_dim <= 64 else 1)
    return Blocks(128 if head_dim <= 64 else 64, 64, 8, 3)


def query_blocks(head_dim: int, dtype: torch.dtype, tma: bool) -> Blocks:
    """Blocks of `query_kernel`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return Blocks(32, 32, 4, 1)
    if tma:
        return Blocks(128, 64 if head_dim <= 64 else 32, 8, 3)
    return Blocks(64, 32, 4, 2) if head_dim <= 64 else Blocks(32, 64, 4, 1)


def default_one_pass(head_dim: int, deterministic: bool) -> bool:
    """Whether the backward takes the one-pass kernel: at d = 64, where it fits the registers.

    It adds up dQ in an order that changes from run to run, so never when asked for determinism.
    """
    return head_dim <= 64 and not deterministic
