"""Tests that compile the Triton kernels for every supported GPU; no GPU is needed.

The tests limit the resources that the compiled kernels use. In Triton's interpreter, a kernel
computes the right values even if the compiled kernel spills registers, computes a product twice, or
needs more shared memory than the GPU has. Without a GPU, only these tests detect such a kernel.
"""

import re

import pytest
import torch

pytest.importorskip("triton", reason="the kernels are written in Triton")

import triton  # Import it only after the check that it is installed.

from diffmegatron.attention.kernels.triton import block_sizes as triton_blocks
from tools.benchmarks.compiled_kernels import (
    SHARED_LIMIT,
    compile_cross_entropy,
    compile_launches,
    compile_subtraction,
    usage_of,
)

BF16, FP32 = torch.bfloat16, torch.float32

# Multiply-adds per pair of a query and a key in one loop, in units of the head dimension. Most
# variants subtract two maps; the variants in PRODUCTS_OF_OTHER_VARIANTS have their own numbers.
PRODUCTS_OF_TWO_MAPS = {"forward": 6, "dkdv": 8, "dkdv one-pass": 10, "dq": 6}
PRODUCTS_OF_OTHER_VARIANTS = {
    # A kernel has one loop for the signal heads, and one for the noise head.
    "grouped": {"forward": 6, "dkdv": 12, "dkdv one-pass": 14, "dq": 8},
    # Above a head dimension of 128, the warps compute the scores of the small blocks twice, and in
    # the backward pass also dP.
    "wide": {"forward": 8, "dkdv": 12, "dq": 10},
    "softmax": {"forward": 2, "dkdv": 4, "dkdv one-pass": 5, "dq": 3},
}

# Register spills by Triton's version, configuration and kernel: bytes of stack, and number of
# accesses to the stack between the first and the last product. The accesses of the grouped forward
# kernel are between its heads, outside of the loops over keys. A configuration is the compute
# capability, the dtype, the head dimension, the form of the backward pass and the variant. Kernels
# that are not listed have NO_SPILLS. Triton 3.7 compiles the dK and dV kernel to one of two codes.
# Different processes may get different codes. The values are those of the code with more spills.
NO_SPILLS = (0, 0)
RECORDED = {
    "3.7": {
        (90, BF16, 128, "split", "norm"): {"forward": (152, 0)},
        (90, BF16, 128, "split", "documents"): {},
        (90, BF16, 128, "split", "grouped"): {"forward": (296, 19)},
        (80, BF16, 128, "split", "grouped"): {},
        (100, BF16, 128, "split", "grouped"): {"forward": (112, 0)},
        (90, BF16, 128, "split", "softmax"): {},
        (90, BF16, 128, "one-pass", "plain"): {"dkdv": (176, 16)},
        (90, BF16, 80, "split", "plain"): {},
        (90, BF16, 256, "split", "norm"): {"dkdv": (8, 0), "dq": (32, 0)},
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
        (90, BF16, 128, "split", "grouped"): {"forward": (224, 22)},
        (80, BF16, 128, "split", "grouped"): {},
        (100, BF16, 128, "split", "grouped"): {"forward": (112, 0)},
        (90, BF16, 128, "split", "softmax"): {},
        (90, BF16, 128, "one-pass", "plain"): {"dkdv": (280, 39)},
        (90, BF16, 80, "split", "plain"): {},
        (90, BF16, 256, "split", "norm"): {"dkdv": (8, 0), "dq": (32, 0)},
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

# Functions that choose the block sizes of each kernel.
CHOOSE_BLOCKS = {
    "forward": triton_blocks.forward_blocks,
    "dkdv": triton_blocks.dkdv_blocks,
    "dq": triton_blocks.dq_blocks,
}


@pytest.mark.parametrize(
    "configuration", RECORDED["3.7"], ids=lambda x: "-".join(map(str, x)).replace("torch.", "")
)
def test_resources_of_every_launch(configuration):
    """Check the spills, the shared memory and the number of products of each kernel.

    With a version of Triton that is not in RECORDED, stack and spills are not checked.
    """
    capability, dtype, head_dim, form, variant = configuration
    launches = compile_launches(
        capability, dtype, head_dim, one_pass=form == "one-pass", variant=variant
    )
    usages = {kernel: usage_of(launch) for kernel, launch in launches.items()}
    kernels = {"forward", "dkdv"} | ({"dq"} if form == "split" else set())
    assert set(usages) - {"preprocess"} == kernels
    assert "preprocess" not in usages or usages["preprocess"].stack == 0
    width = "wide" if head_dim > 128 else variant
    counts = PRODUCTS_OF_OTHER_VARIANTS.get(width, PRODUCTS_OF_TWO_MAPS)
    for kernel in kernels:
        # A kernel that masks all blocks has one loop. The kernel for dK and dV always does so, and
        # with documents every kernel does. Other kernels have a second loop for unmasked blocks.
        loops = 1 if variant == "documents" or kernel == "dkdv" else 2
        usage = usages[kernel]
        if VERSION in RECORDED:
            stack, spills = RECORDED[VERSION][configuration].get(kernel, NO_SPILLS)
            assert usage.stack <= stack, kernel
            assert usage.spills <= spills, kernel
        assert usage.shared <= SHARED_LIMIT[capability], kernel
        is_hopper = capability == 90 and dtype == BF16 and head_dim <= 128
        assert usage.has_wgmma == is_hopper, kernel
        assert not usage.is_serialized, kernel
        if "tcgen05.mma" in launches[kernel].asm["ptx"]:
            # The instructions of Blackwell's products into tensor memory do not show their sizes.
            assert capability == 100, kernel
            continue
        # If there were more products than the query-key pairs of a block need, warps would repeat
        # a product.
        is_one_pass = kernel == "dkdv" and form == "one-pass"
        count = counts["dkdv one-pass" if is_one_pass else kernel]
        target = triton_blocks.target_of(dtype, divmod(capability, 10), head_dim)
        further = {"dkdv": (form == "one-pass",), "dq": (variant == "grouped",)}
        blocks = CHOOSE_BLOCKS[kernel](head_dim, dtype, target, *further.get(kernel, ()))
        columns = triton.next_power_of_2(head_dim)
        assert usage.products == loops * count * columns * blocks.M * blocks.N, kernel


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_subtraction_uses_no_stack_and_at_most_1_kib_of_shared_memory(capability):
    for dtype, head_dim in ((BF16, 128), (FP32, 96)):
        launches = compile_subtraction(capability, dtype, head_dim)
        assert set(launches) == {"subtract", "subtract_backward"}
        for kernel in launches.values():
            usage = usage_of(kernel)
            assert usage.stack == 0
            assert usage.shared <= 1024


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_cross_entropy_uses_no_stack_and_moves_128_bits_at_once(capability, dtype):
    launches = compile_cross_entropy(capability, dtype)
    assert set(launches) == {"statistics", "gradient"}
    for kernel in launches.values():
        usage = usage_of(kernel)
        assert usage.stack == 0
        assert usage.shared <= 1024
    # The forward pass reads the logits, and the backward pass reads and overwrites them. These
    # accesses must have 128 bits.
    assert "ld.global.v4" in launches["statistics"].asm["ptx"]
    assert {"ld.global.v4", "st.global.v4"} <= vector_accesses(launches["gradient"].asm["ptx"])


def vector_accesses(ptx: str) -> set[str]:
    """Return the global loads and stores in PTX that move four registers at once."""
    return set(re.findall(r"(?:ld|st)\.global\.v4", ptx))


def test_unknown_gpus_get_a_target_by_capability():
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
def test_blocks_are_loaded_two_rounds_ahead_and_never_into_a_buffer_in_use(head_dim, form):
    """Check that the dK and dV kernel's loop waits for its products before it loads a block.

    The loop runs over blocks of query rows. A block has three loads: q1, q2 and dO. Two blocks are
    loaded before the loop, and one more block in each round. There are only two buffers for each of
    the three tensors, so a round loads into the buffers that its own products use. These products
    must have finished before the loads begin.
    """
    launches = compile_launches(90, BF16, head_dim, one_pass=form == "one-pass")
    code = launches["dkdv"].asm
    load, product, wait = "async_tma_copy_global_to_local", "warp_group_dot ", "warp_group_dot_wait"
    # First check the intermediate representation (TTGIR), in which the loop is visible.
    events = re.findall(rf"scf\.for|{load}|{product}|{wait}.*pendings = 0", code["ttgir"])
    *_, before, in_loop = "\n".join(events).split("scf.for")
    assert before.count(load) == 2 * 3
    products, *loads = in_loop.split(load)
    assert len(loads) == 3 and not any("warp_group_dot" in x for x in loads)
    assert products.strip().splitlines()[-1].startswith(wait)
    # Then check the assembly code (PTX): all warps must meet at a barrier before one of them loads
    # into buffers that the other warps have read. In the pattern, W is a wait for the products, b
    # is a barrier, c is a load, and m is a wait for a load.
    load, wait = r"cp\.async\.bulk\.tensor", r"wgmma\.wait_group\.sync\.aligned 0"
    events = re.findall(rf"bar\.sync|{load}|{wait}|mbarrier\.try_wait", code["ptx"])
    letters = "".join("W" if "wgmma" in x else x[0] for x in events)
    assert re.search("W(b+c){3}b*m", letters)
