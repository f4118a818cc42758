"""Compile the Triton kernels with other block sizes, and list their resources; no GPU is needed.

For one kernel at a time, every combination of these is compiled: rows M and keys N of a block,
warps, stages, and loop-invariant code motion. Combinations are dropped if they serialize wgmma, or
need more of a resource, such as shared memory, than the chip has. Writes the combinations, best
first, to docs/results/NAME.json. The default block sizes (`triton/block_sizes.py`) are chosen from
these lists. `diffmegatron tune` times them on a GPU.

    python -m tools.benchmarks kernel_resources --head-dim 64 --kernels dkdv_one_pass

Compiling everything takes minutes.
"""

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from triton.runtime.errors import OutOfResources

from diffmegatron.attention.kernels.configuration import BlockSizes
from diffmegatron.attention.kernels.triton import kernel_launch as launch
from tools.benchmarks.compiled_kernels import SHARED_LIMIT, Usage, compile_launches, usage_of
from tools.benchmarks.json_report import write_json_report
from tools.benchmarks.machine import describe_machine
from tools.paths import RESULTS

KERNELS = ("forward", "dkdv", "dkdv_one_pass", "dq")
# COUNTS: multiply-adds of each kernel per pair of a query and a key, divided by the head width d.
# LOOPS: number of copies of these products in the kernel's machine code. It is 2 for kernels with
# one loop that applies the mask and another loop that does not.
COUNTS = dict(zip(KERNELS, (6, 8, 10, 6), strict=True))
LOOPS = dict(zip(KERNELS, (2, 1, 1, 2), strict=True))
# Compute capabilities to compile for. Their machine code shows the sizes of matrix instructions,
# which the machine code for Blackwell (10.x) does not.
COUNTED = sorted(capability for capability in SHARED_LIMIT if capability // 10 != 10)


@contextmanager
def chosen(kernel: str, blocks: BlockSizes) -> Iterator[None]:
    """Make the kernel use these block sizes within the context."""
    function = f"{kernel.removesuffix('_one_pass')}_blocks"
    with mock.patch.object(launch, function, lambda *_: blocks):
        yield


def compiled(kernel: str, blocks: BlockSizes, arguments: argparse.Namespace) -> Usage | None:
    """Compile a kernel with these block sizes.

    Returns:
        The kernel's resources; None if it needs more of a resource, such as shared memory, than the
        GPU has, or if it serializes wgmma.
    """
    one_pass = kernel == "dkdv_one_pass"
    capability = arguments.capability
    with chosen(kernel, blocks):
        try:
            kernels = compile_launches(
                capability, torch.bfloat16, arguments.head_dim, one_pass=one_pass
            )
        except OutOfResources:
            return None
    usage = usage_of(kernels[kernel.removesuffix("_one_pass")])
    fits = usage.shared <= SHARED_LIMIT[capability] and not usage.is_serialized
    return usage if fits else None


def try_all(kernel: str, arguments: argparse.Namespace) -> list[dict]:
    """Return a row of figures for each combination that can run, best first."""
    rows = []
    licm = map(bool, arguments.licm)
    sizes = (arguments.rows, arguments.keys, arguments.warps, arguments.stages, licm)
    for blocks in itertools.starmap(BlockSizes, itertools.product(*sizes)):
        usage = compiled(kernel, blocks, arguments)
        if usage is None:
            continue
        columns = 64 if arguments.head_dim <= 64 else 128
        pairs = blocks.M * blocks.N
        row = {
            **blocks._asdict(),
            "stack_bytes": usage.stack,
            "spills_in_loops": usage.spills,
            "shared_bytes": usage.shared,
            "work": usage.products / (LOOPS[kernel] * COUNTS[kernel] * columns * pairs),
            "estimated_cycles": usage.cycles / LOOPS[kernel] * 64 * 64 / pairs,
        }
        rows.append(row)
        print(kernel, row, flush=True)
    return sorted(rows, key=_badness)


def _badness(row: dict) -> tuple:
    """Return a sort key of a combination: lower is better.

    It is an estimate from the machine code with these criteria, the most important first:

    1. At most 50 spills in loops.
    2. At least three stages. With fewer, loads do not overlap with computation, because a kernel
       waits for a block's loads as soon as it has issued them.
    3. Fewer estimated cycles.
    4. Fewer spills.
    """
    many_spills, overlaps = row["spills_in_loops"] > 50, row["num_stages"] >= 3
    return (many_spills, not overlaps, row["estimated_cycles"], row["spills_in_loops"])


def main(arguments: argparse.Namespace) -> None:
    """Try every kernel, then write the file and print the best of each."""
    chip = f"sm_{arguments.capability}"
    report: dict = {
        "machine": describe_machine("cpu"),
        "settings": f"bf16, causal, d={arguments.head_dim}, compiled for {chip}, nothing timed; "
        "cycles are an estimate for 64 x 64 pairs",
        "kernels": {},
    }
    name = arguments.name or f"kernel_resources_{chip}_d{arguments.head_dim}"
    for kernel in arguments.kernels:
        report["kernels"][kernel] = try_all(kernel, arguments)
        write_json_report(RESULTS / f"{name}.json", report)
    for kernel, rows in report["kernels"].items():
        print(f"{kernel}: best {rows[:3]}")
    print(f"wrote {RESULTS / name}.json")
