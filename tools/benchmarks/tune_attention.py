"""Try other block sizes for the Triton kernels: time them on a GPU, or only compile them.

For one kernel at a time, every combination of these is compiled: rows M and keys N of a block,
warps, stages, and loop-invariant code motion. Combinations are dropped if they serialize wgmma, or
need more of a resource, such as shared memory, than the chip has. On a GPU the other combinations
are timed alternately with the default block sizes, and their results are compared with the
default's. Without a GPU, there are only the compiler's figures and an estimate of Hopper's
tensor-core cycles. Writes the combinations, best first, to docs/results/NAME.json. If one is better
than the default, enter it by hand in `triton/block_sizes.py`.

    python -m tools.benchmarks tune_attention --head-dim 64 --kernels dkdv_one_pass
    python -m tools.benchmarks tune_attention --listed docs/results/tune_sm_90_d128.json --best 8

Compiling everything takes minutes; the second command tries only the best of an earlier list.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.maps import QKV
from diffmegatron.attention.kernels.triton import kernel_launch as launch
from diffmegatron.attention.kernels.triton import triton_attention
from diffmegatron.attention.kernels.triton.block_sizes import BlockSizes
from diffmegatron.errors import UserError
from diffmegatron.tuning.timing import timed
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


def find_capability(given: int | None) -> int:
    """Return the compute capability of the GPU; without a GPU, the given one, by default Hopper's.

    Raises:
        UserError: If the kernels are not tuned for this capability, or the GPU has another one.
    """
    here = this_capability()
    known = sorted(SHARED_LIMIT) if here is not None else COUNTED
    capability = here or given or 90
    if capability not in known:
        raise UserError(
            f"compute capability {capability} is unknown; the kernels are tuned on "
            + ", ".join(map(str, known))
        )
    if given not in (None, capability):
        raise UserError(f"--capability {given} on a GPU of {here}: leave it out")
    return capability


def this_capability() -> int | None:
    """Return the GPU's compute capability, such as 90 for Hopper; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


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


def build_pass(kernel: str, arguments: argparse.Namespace) -> Callable[[], list[Tensor]]:
    """Return a function that runs the forward or backward pass with this kernel."""
    torch.manual_seed(0)
    width, length = arguments.head_dim, arguments.length
    inputs = [
        torch.randn(1, length, arguments.heads, columns, device="cuda", dtype=torch.bfloat16)
        for columns in (*[width] * 4, 2 * width)
    ]
    inputs = [x.requires_grad_() for x in (*inputs, torch.tensor(0.7, device="cuda"))]
    call = AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5])

    def forward() -> list[Tensor]:
        return [triton_attention.attend(call, one_pass=kernel == "dkdv_one_pass")]

    if kernel == "forward":
        return forward
    (out,) = forward()
    grad = torch.randn_like(out)
    return lambda: list(torch.autograd.grad(out, inputs, grad, retain_graph=True))


def compared(kernel: str, blocks: BlockSizes, arguments: argparse.Namespace) -> dict[str, float]:
    """Time block sizes alternately with the default ones, and compare the results.

    Returns:
        Median milliseconds of the block sizes on trial, their ratio to the default's, and the
        largest relative difference of a result from the default's.
    """
    run = build_pass(kernel, arguments)
    choices = {"default": nullcontext, "trial": partial(chosen, kernel, blocks)}
    seconds: dict[str, list[float]] = {name: [] for name in choices}
    results: dict[str, list[Tensor]] = {}
    warm_up = 1
    for repetition in range(arguments.repetitions + warm_up):
        for name, choice in choices.items():
            with choice():
                elapsed, results[name] = timed(run, "cuda")
            if repetition >= warm_up:
                seconds[name].append(elapsed)
    default, trial = (statistics.median(seconds[name]) for name in choices)
    return {
        "ms": 1e3 * trial,
        "ratio_to_default": trial / default,
        "largest_error": largest_error(results["trial"], results["default"]),
    }


def largest_error(found: list[Tensor], right: list[Tensor]) -> float:
    """Return the largest difference of the tensors in ``found`` from those in ``right``.

    The difference of each tensor is divided by the largest magnitude in the tensor of ``right``.
    """
    return max(
        float((a.detach().float() - b.detach().float()).abs().max() / b.detach().abs().max())
        for a, b in zip(found, right, strict=True)
    )


def candidates(kernel: str, arguments: argparse.Namespace) -> list[BlockSizes]:
    """Return all combinations of the command line's values, or the best of an earlier list."""
    if arguments.listed is not None:
        rows = json.loads(arguments.listed.read_text())["kernels"].get(kernel, [])
        return [
            BlockSizes(*(row[name] for name in BlockSizes._fields))
            for row in rows[: arguments.best]
        ]
    licm = map(bool, arguments.licm)
    sizes = (arguments.rows, arguments.keys, arguments.warps, arguments.stages, licm)
    return [BlockSizes(*combination) for combination in itertools.product(*sizes)]


def try_all(kernel: str, arguments: argparse.Namespace) -> list[dict]:
    """Return a row of figures for each combination that can run, best first."""
    rows = []
    for blocks in candidates(kernel, arguments):
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
        if torch.cuda.is_available():
            try:
                row |= compared(kernel, blocks, arguments)
            except Exception as error:  # A failed launch must not stop the other rows.
                row["failure"] = f"{type(error).__name__}: {error}".splitlines()[0]
        rows.append(row)
        print(kernel, row, flush=True)
    return sorted(rows, key=_badness)


def _badness(row: dict) -> tuple:
    """Return a sort key of a combination: lower is better.

    Combinations with a measured time come first, by their time relative to the default. The others
    follow, by an estimate from the machine code with these criteria, the most important first:

    1. At most 50 spills in loops.
    2. At least three stages. With fewer, loads do not overlap with computation, because a kernel
       waits for a block's loads as soon as it has issued them.
    3. Fewer estimated cycles.
    4. Fewer spills.
    """
    if "ratio_to_default" in row:
        return (0, row["ratio_to_default"])
    many_spills, overlaps = row["spills_in_loops"] > 50, row["num_stages"] >= 3
    return (1, many_spills, not overlaps, row["estimated_cycles"], row["spills_in_loops"])


def main(arguments: argparse.Namespace) -> None:
    """Try every kernel, then write the file and print the best of each."""
    arguments.capability = find_capability(arguments.capability)
    on_gpu, chip = torch.cuda.is_available(), f"sm_{arguments.capability}"
    report: dict = {
        "machine": describe_machine("cuda" if on_gpu else "cpu"),
        "settings": f"bf16, causal, d={arguments.head_dim}, "
        + (
            f"length {arguments.length}, h={arguments.heads}, median of {arguments.repetitions}"
            if on_gpu
            else f"compiled for {chip}, nothing timed; cycles are an estimate for 64 x 64 pairs"
        ),
        "kernels": {},
    }
    name = arguments.name or f"tune_{'cuda' if on_gpu else chip}_d{arguments.head_dim}"
    for kernel in arguments.kernels:
        report["kernels"][kernel] = try_all(kernel, arguments)
        write_json_report(RESULTS / f"{name}.json", report)
    for kernel, rows in report["kernels"].items():
        print(f"{kernel}: best {rows[:3]}")
    print(f"wrote {RESULTS / name}.json")
