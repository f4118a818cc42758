"""Try other block sizes for the Triton kernels: time them on a GPU, or see what they would take.

Every combination of rows M, keys N, warps and stages is compiled for one kernel at a time. Those
that do not compile, need more shared memory than the chip has, or serialise wgmma are left out. On
a GPU the rest are timed beside the default, and their results compared with it; without one, what
the compiler says of sm_90 is listed, with an estimate of tensor-core cycles. Best first. Writes
NAME.json to benchmarks/results/; `triton_config.py` is where a better choice goes.

    python tools/tune_attention.py --head-dim 64 --kernels key_value_one_pass
    python tools/tune_attention.py --listed benchmarks/results/tune_sm_90_d128.json --best 8

Compiling everything takes minutes: the last command tries the best of an earlier listing alone.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from bench_attention import RESULTS, describe_machine, timed
from compiled_kernels import SHARED_LIMIT, Usage, compile_launches, usage_of
from torch import Tensor
from triton.runtime.errors import OutOfResources

from diffmegatron.attention.kernels import triton_attention
from diffmegatron.attention.kernels.triton_config import Blocks
from diffmegatron.attention.kernels.validate import build_mask

KERNELS = ("forward", "key_value", "key_value_one_pass", "query")
# Multiply-adds per pair in units of d; the machine code has a loop with masks and one without.
COUNTS = dict(zip(KERNELS, (6, 8, 10, 6), strict=True))
LOOPS = 2


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--head-dim", type=int, choices=[64, 96, 128], default=128, help="d")
    parser.add_argument("--length", type=int, default=4096, help="tokens of the timed sequence")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128], help="M to try")
    parser.add_argument("--keys", type=int, nargs="+", default=[32, 64, 128], help="N to try")
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--listed", type=Path, help="an earlier result: try its best blocks alone")
    parser.add_argument("--best", type=int, default=8, help="how many of the listed, per kernel")
    parser.add_argument("--name", help="name of the result file; default the chip and d")
    return parser.parse_args()


@contextmanager
def chosen(kernel: str, blocks: Blocks) -> Iterator[None]:
    """Within, the kernel runs in these blocks."""
    function = f"{kernel.removesuffix('_one_pass')}_blocks"
    with mock.patch.object(triton_attention, function, lambda *_: blocks):
        yield


def compiled(kernel: str, blocks: Blocks, head_dim: int) -> Usage | None:
    """What the kernel takes on sm_90; None where it does not fit or wgmma would be serialised."""
    one_pass = kernel == "key_value_one_pass"
    with chosen(kernel, blocks):
        try:
            kernels = compile_launches(90, torch.bfloat16, head_dim, one_pass=one_pass)
        except OutOfResources:
            return None
    usage = usage_of(kernels[kernel.removesuffix("_one_pass")])
    fits = usage.shared <= SHARED_LIMIT[90] and not usage.is_serialized
    return usage if fits else None


def measured(kernel: str, blocks: Blocks | None, arguments: argparse.Namespace) -> dict:
    """Median milliseconds of the forward or the backward pass, and its results.

    Args:
        kernel: the one whose blocks are chosen; others keep theirs.
        blocks: None for the default.
        arguments: the command line.
    """
    torch.manual_seed(0)
    width, length = arguments.head_dim, arguments.length
    inputs = [
        torch.randn(1, length, arguments.heads, columns, device="cuda", dtype=torch.bfloat16)
        for columns in (*[width] * 4, 2 * width)
    ]
    inputs = [x.requires_grad_() for x in (*inputs, torch.tensor(0.7, device="cuda"))]
    mask = build_mask(length, length, causal=True, cu_seqlens=None, query_offset=None, key_offset=0)

    def forward() -> Tensor:
        return triton_attention.diff_attention(
            *inputs,
            softmax_scale=width**-0.5,
            mask=mask,
            one_pass=kernel == "key_value_one_pass",
        )

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)

    with chosen(kernel, blocks) if blocks is not None else mock.patch.dict({}):
        out = forward()
        function = forward if kernel == "forward" else backward
        function()
        seconds, results = [], out
        for _ in range(arguments.repetitions):
            elapsed, results = timed(function, "cuda")
            seconds.append(elapsed)
    tensors = (results,) if isinstance(results, Tensor) else results
    return {"ms": 1e3 * statistics.median(seconds), "results": [x.detach() for x in tensors]}


def largest_error(found: list[Tensor], right: list[Tensor]) -> float:
    """Of any result, relative to its largest magnitude."""
    return max(
        float((a.float() - b.float()).abs().max() / b.float().abs().max())
        for a, b in zip(found, right, strict=True)
    )


def candidates(kernel: str, arguments: argparse.Namespace) -> list[Blocks]:
    """Every combination of the command line's, or the best of an earlier listing."""
    if arguments.listed is not None:
        rows = json.loads(arguments.listed.read_text())["kernels"].get(kernel, [])
        return [Blocks(*(row[name] for name in Blocks._fields)) for row in rows[: arguments.best]]
    sizes = (arguments.rows, arguments.keys, arguments.warps, arguments.stages)
    return [Blocks(*combination) for combination in itertools.product(*sizes)]


def try_all(kernel: str, arguments: argparse.Namespace) -> list[dict]:
    """One row per combination that can run, best first."""
    on_gpu = torch.cuda.is_available()
    default = measured(kernel, None, arguments) if on_gpu else None
    rows = []
    for blocks in candidates(kernel, arguments):
        usage = compiled(kernel, blocks, arguments.head_dim)
        if usage is None:
            continue
        columns = 64 if arguments.head_dim <= 64 else 128
        pairs = blocks.M * blocks.N
        row = {
            **blocks._asdict(),
            "stack_bytes": usage.stack,
            "spills_in_loops": usage.spills,
            "shared_bytes": usage.shared,
            "work": usage.products / (LOOPS * COUNTS[kernel] * columns * pairs),
            "estimated_cycles": usage.cycles / LOOPS * 64 * 64 / pairs if usage.has_wgmma else None,
        }
        if default is not None:
            trial = measured(kernel, blocks, arguments)
            row["ms"] = trial["ms"]
            row["ratio_to_default"] = trial["ms"] / default["ms"]
            row["largest_error"] = largest_error(trial["results"], default["results"])
        rows.append(row)
        print(kernel, row, flush=True)
    return sorted(rows, key=_badness)


def _badness(row: dict) -> tuple:
    """Time where it was measured; else spills in the loops, then cycles."""
    if "ms" in row:
        return (row["ms"],)
    return (row["spills_in_loops"] > 8, row["estimated_cycles"] or float("inf"))


def main() -> None:
    """Try every kernel, then write the file and print the best of each."""
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    arguments.device = "cuda" if on_gpu else "cpu"
    report = {
        "machine": describe_machine(arguments),
        "settings": f"bf16, causal, d={arguments.head_dim}, "
        + (
            f"length {arguments.length}, h={arguments.heads}, median of {arguments.repetitions}"
            if on_gpu
            else "compiled for sm_90, nothing timed; cycles are an estimate for 64 x 64 pairs"
        ),
        "kernels": {kernel: try_all(kernel, arguments) for kernel in arguments.kernels},
    }
    name = arguments.name or f"tune_{'cuda' if on_gpu else 'sm_90'}_d{arguments.head_dim}"
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    for kernel, rows in report["kernels"].items():
        print(f"{kernel}: best {rows[:3]}")
    print(f"wrote {RESULTS / name}.json")


if __name__ == "__main__":
    main()
