"""The kernels compile for every chip without a GPU, within what was recorded.

A kernel that starts to spill, to multiply twice what it needs once, or to need more shared memory
than the chip has, still computes the right values: nothing but this test would tell.
"""

import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton  # after the check for it

from diffmegatron.attention.kernels.triton import block_sizes as triton_blocks
from tools.benchmarks.compiled_kernels import (
    SHARED_LIMIT,
    compile_cross_entropy,
    compile_launches,
    compile_subtraction,
    usage_of,
)

BF16, FP32 = torch.bfloat16, torch.float32

# Multiply-adds per pair in units of d; every loop has them.
COUNTS = {"forward": 6, "dkdv": 8, "dkdv one-pass": 10, "dq": 6}
COUNTS_OF_ONE_MAP = {
    "grouped": {"forward": 3, "dkdv": 6, "dkdv one-pass": 7, "dq": 4},
    "softmax": {"forward": 2, "dkdv": 4, "dkdv one-pass": 5, "dq": 3},
}


# What does not fit the registers, where it is not nothing, by the compiler that was asked:
# (bytes of stack, accesses to it from the first to the last product). From one process to another
# triton 3.7 gives one of two codes for dK and dV: this is the larger.
NOTHING = (0, 0)
RECORDED = {
    "3.7": {
        (90, BF16, 128, "split", "norm"): {"forward": (144, 0)},
        (90, BF16, 128, "split", "documents"): {},
        (90, BF16, 128, "split", "grouped"): {},
        (90, BF16, 128, "split", "softmax"): {},
        (90, BF16, 128, "one-pass", "plain"): {"dkdv": (176, 16)},
        (90, BF16, 96, "split", "plain"): {},
        (90, BF16, 64, "one-pass", "norm"): {},
        (90, BF16, 64, "split", "plain"): {},
        (90, BF16, 64, "split", "documents"): {},
        (80, BF16, 128, "split", "norm"): {"dkdv": (16, 0)},
        (80, BF16, 128, "one-pass", "plain"): {"dkdv": (136, 0)},
        (80, BF16, 64, "one-pass", "norm"): {},
        (80, BF16, 64, "split", "plain"): {},
        (80, BF16, 128, "split", "softmax"): {},
        (89, BF16, 64, "one-pass", "softmax"): {},
        (80, FP32, 128, "split", "plain"): {"dkdv": (48, 0)},
        (89, BF16, 128, "split", "norm"): {"dkdv": (56, 0), "dq": (40, 0)},
        (89, BF16, 128, "one-pass", "plain"): {"dkdv": (120, 0)},
        (89, FP32, 128, "split", "plain"): {"dq": (24, 0)},
        (100, BF16, 128, "split", "norm"): {"dq": (40, 2)},
        (100, BF16, 64, "one-pass", "norm"): {"dkdv": (8, 0)},
        (120, BF16, 128, "split", "norm"): {
            "forward": (48, 6),
            "dkdv": (112, 0),
            "dq": (48, 4),
        },
        (120, BF16, 64, "one-pass", "norm"): {"forward": (32, 14)},
    },
    "3.6": {
        (90, BF16, 128, "split", "norm"): {"forward": (144, 0)},
        (90, BF16, 128, "split", "documents"): {},
        (90, BF16, 128, "split", "grouped"): {},
        (90, BF16, 128, "split", "softmax"): {},
        (90, BF16, 128, "one-pass", "plain"): {"dkdv": (280, 39)},
        (90, BF16, 96, "split", "plain"): {},
        (90, BF16, 64, "one-pass", "norm"): {},
        (90, BF16, 64, "split", "plain"): {},
        (90, BF16, 64, "split", "documents"): {},
        (80, BF16, 128, "split", "norm"): {"dkdv": (16, 0)},
        (80, BF16, 128, "one-pass", "plain"): {"dkdv": (120, 0)},
        (80, BF16, 64, "one-pass", "norm"): {},
        (80, BF16, 64, "split", "plain"): {"dkdv": (24, 0)},
        (80, BF16, 128, "split", "softmax"): {},
        (89, BF16, 64, "one-pass", "softmax"): {},
        (80, FP32, 128, "split", "plain"): {"dkdv": (48, 0)},
        (89, BF16, 128, "split", "norm"): {"dkdv": (56, 0), "dq": (8, 0)},
        (89, BF16, 128, "one-pass", "plain"): {"dkdv": (120, 0)},
        (89, FP32, 128, "split", "plain"): {"dkdv": (72, 0), "dq": (24, 0)},
        (100, BF16, 128, "split", "norm"): {"dq": (16, 0)},
        (100, BF16, 64, "one-pass", "norm"): {},
        (120, BF16, 128, "split", "norm"): {"dkdv": (112, 0), "dq": (48, 3)},
        (120, BF16, 64, "one-pass", "norm"): {},
    },
}
VERSION = ".".join(triton.__version__.split(".")[:2])


CHOICE = {
    "forward": triton_blocks.forward_blocks,
    "dkdv": triton_blocks.dkdv_blocks,
    "dq": triton_blocks.dq_blocks,
}


@pytest.mark.parametrize(
    "configuration", RECORDED["3.7"], ids=lambda x: "-".join(map(str, x)).replace("torch.", "")
)
def test_what_the_compiler_makes_of_every_launch(configuration):
    """Of other compilers than the recorded ones all is held but stack and spills."""
    capability, dtype, head_dim, form, variant = configuration
    launches = compile_launches(
        capability, dtype, head_dim, one_pass=form == "one-pass", variant=variant
    )
    usages = {kernel: usage_of(launch) for kernel, launch in launches.items()}
    kernels = {"forward", "dkdv"} | ({"dq"} if form == "split" else set())
    assert set(usages) - {"preprocess"} == kernels
    assert "preprocess" not in usages or usages["preprocess"].stack == 0
    counts = COUNTS_OF_ONE_MAP.get(variant, COUNTS)
    for kernel in kernels:
        # With documents, and for dK and dV, all blocks are masked; else some, in a loop apart.
        loops = 1 if variant == "documents" or kernel == "dkdv" else 2
        usage = usages[kernel]
        if VERSION in RECORDED:
            stack, spills = RECORDED[VERSION][configuration].get(kernel, NOTHING)
            assert usage.stack <= stack, kernel
            assert usage.spills <= spills, kernel
        assert usage.shared <= SHARED_LIMIT[capability], kernel
        assert usage.has_wgmma == (capability == 90 and dtype == BF16), kernel
        assert not usage.is_serialized, kernel
        if "tcgen05.mma" in launches[kernel].asm["ptx"]:
            # Blackwell's products into tensor memory do not name their sizes.
            assert capability == 100, kernel
            continue
        # More than the pairs of a block need would be a product that warps compute twice.
        is_one_pass = kernel == "dkdv" and form == "one-pass"
        count = counts["dkdv one-pass" if is_one_pass else kernel]
        target = triton_blocks.target_of(dtype, divmod(capability, 10))
        form_of = (form == "one-pass",) if kernel == "dkdv" else ()
        blocks = CHOICE[kernel](head_dim, dtype, target, *form_of)
        columns = 64 if head_dim <= 64 else 128
        assert usage.products == loops * count * columns * blocks.M * blocks.N, kernel


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_the_subtraction_needs_neither_stack_nor_shared_memory_for_tiles(capability):
    for dtype, head_dim in ((BF16, 128), (FP32, 96)):
        launches = compile_subtraction(capability, dtype, head_dim)
        assert set(launches) == {"subtract", "subtract_backward"}
        for kernel in launches.values():
            usage = usage_of(kernel)
            assert usage.stack == 0
            assert usage.shared <= 1024


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_the_cross_entropy_needs_no_stack_and_moves_128_bits_at_once(capability, dtype):
    launches = compile_cross_entropy(capability, dtype)
    assert set(launches) == {"statistics", "gradient"}
    for kernel in launches.values():
        usage = usage_of(kernel)
        assert usage.stack == 0
        assert usage.shared <= 1024
    # All of a logit's traffic: one read forward, one read and one write backward.
    assert "ld.global.v4" in launches["statistics"].asm["ptx"]
    assert {"ld.global.v4", "st.global.v4"} <= vectors(launches["gradient"].asm["ptx"])


def vectors(ptx: str) -> set[str]:
    """Kinds of accesses to global memory that move four registers at once."""
    return set(re.findall(r"(?:ld|st)\.global\.v4", ptx))


def test_unknown_chips_get_what_fits_all():
    targets = {
        (8, 0): "large",
        (8, 6): "small",
        (8, 9): "small",
        (9, 0): "hopper",
        (10, 3): "large",
        (12, 1): "small",
        (13, 0): "small",
    }
    for capability, expected in targets.items():
        assert triton_blocks.target_of(BF16, capability).value == expected
    assert triton_blocks.target_of(FP32, (9, 0)).value == "large"


@pytest.mark.parametrize("form", ["split", "one-pass"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_are_loaded_two_ahead_and_never_over_one_in_use(head_dim, form):
    """The loop over query rows: q1, q2 and dO of two blocks before it, of one more in each round.

    `_pairs` gets by with two buffers of each; so what is loaded lies where the round's products
    read, and these must have been waited for.
    """
    launches = compile_launches(90, BF16, head_dim, one_pass=form == "one-pass")
    code = launches["dkdv"].asm
    load, product, wait = "async_tma_copy_global_to_local", "warp_group_dot ", "warp_group_dot_wait"
    events = re.findall(rf"scf\.for|{load}|{product}|{wait}.*pendings = 0", code["ttgir"])
    *_, before, in_loop = "\n".join(events).split("scf.for")
    assert before.count(load) == 2 * 3
    products, *loads = in_loop.split(load)
    assert len(loads) == 3 and not any("warp_group_dot" in x for x in loads)
    assert products.strip().splitlines()[-1].startswith(wait)
    # All warps meet before one of them loads over what the others read.
    load, wait = r"cp\.async\.bulk\.tensor", r"wgmma\.wait_group\.sync\.aligned 0"
    events = re.findall(rf"bar\.sync|{load}|{wait}|mbarrier\.try_wait", code["ptx"])
    letters = "".join("W" if "wgmma" in x else x[0] for x in events)
    assert re.search("W(b+c){3}b*m", letters)
