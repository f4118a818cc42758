"""The chosen block sizes compile for sm_90 and sm_80 without a GPU, within what was recorded.

A kernel that starts to spill, or to need more shared memory than the chip has, still computes the
right values: nothing but this test would tell.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

from compiled import compile_kernel  # after the check for triton

# Bytes of shared memory that one block may have.
SHARED_LIMIT = {90: 227 * 1024, 80: 163 * 1024}

# (kernel, capability, dtype, head_dim, one pass): bytes of stack recorded with triton 3.7.1.
RECORDED_STACK = {
    ("forward", 90, torch.bfloat16, 128, False): 0,
    ("key_value", 90, torch.bfloat16, 128, False): 16,
    ("key_value", 90, torch.bfloat16, 128, True): 176,
    ("query", 90, torch.bfloat16, 128, False): 16,
    ("forward", 90, torch.bfloat16, 64, False): 0,
    ("key_value", 90, torch.bfloat16, 64, True): 0,
    ("query", 90, torch.bfloat16, 64, False): 0,
    ("forward", 80, torch.bfloat16, 128, False): 0,
    ("key_value", 80, torch.bfloat16, 128, False): 160,
    ("query", 80, torch.bfloat16, 128, False): 0,
    ("forward", 80, torch.float32, 128, False): 0,
    ("key_value", 80, torch.float32, 128, False): 0,
    ("query", 80, torch.float32, 128, False): 0,
}


@pytest.mark.parametrize(
    ("configuration", "stack"),
    RECORDED_STACK.items(),
    ids=lambda x: (
        "-".join(str(part).removeprefix("torch.") for part in x) if isinstance(x, tuple) else ""
    ),
)
def test_spills_and_shared_memory(configuration, stack):
    usage = compile_kernel(*configuration)
    capability, dtype = configuration[1:3]
    assert usage.stack <= stack
    assert usage.shared <= SHARED_LIMIT[capability]
    assert ("wgmma" in usage.ptx) == (capability == 90 and dtype == torch.bfloat16)
