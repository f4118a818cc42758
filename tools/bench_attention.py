"""Time differential attention backends beside a plain Transformer's attention, in one run.

Every form is timed at equal model size: h diff heads with V 2d wide against 2h heads of d. The
repetitions of all forms alternate, so that a machine that slows down slows all of them. Writes
NAME.json, NAME.md and NAME.png to benchmarks/results/.

    python tools/bench_attention.py                       # on a GPU: bf16, 2K to 64K
    python tools/bench_attention.py --device cpu --dtype float32 --lengths 1024 2048 4096
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata, util
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from diffmegatron.attention.kernels import diff_attention, softmax_attention
from diffmegatron.attention.kernels.select import BACKENDS, importable_libraries, why_not
from diffmegatron.attention.kernels.validate import build_mask

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
PLAIN = "transformer_sdpa"

# Multiply-adds per (query, key) pair and diff head, in units of d: forward, backward.
COUNTS = {
    PLAIN: (4, 10),
    "transformer_flash": (4, 10),
    "reference": (4, 8),
    "blocked": (4, 10),
    "triton_split": (6, 14),
    "triton_one_pass": (6, 10),
    "flash_2call": (6, 14),
    "flash_4call": (8, 20),
    "sdpa_4call": (8, 20),
    "flex": (6, 14),
}

Result = TypeVar("Result")
Form = tuple[Callable[..., Tensor], list[Tensor]]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768, 65536]
    )
    parser.add_argument("--tokens", type=int, help="tokens per batch; default one sequence")
    parser.add_argument("--heads", type=int, default=12, help="diff heads h; the twin has 2h")
    parser.add_argument("--kv-heads", type=int, help="kv heads of diff attention; default h")
    parser.add_argument("--head-dim", type=int, default=128, help="d")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--backends", nargs="+", help="backends to time; default all that can run")
    parser.add_argument("--name", help="name of the result files; default device, dtype and d")
    return parser.parse_args()


def build_forms(arguments: argparse.Namespace, length: int) -> dict[str, Form]:
    """Each form's function of its inputs, and the inputs."""
    dtype = getattr(torch, arguments.dtype)
    batch = max((arguments.tokens or length) // length, 1)
    heads, width = arguments.heads, arguments.head_dim
    kv_heads = arguments.kv_heads or heads

    def draw(count: int, columns: int) -> Tensor:
        x = torch.randn(batch, length, count, columns, device=arguments.device, dtype=dtype)
        return x.requires_grad_()

    shapes = [(heads, width), (kv_heads, width)] * 2 + [(kv_heads, 2 * width)]
    lambda_ = torch.tensor(0.7, device=arguments.device, requires_grad=True)
    diff = [*(draw(*shape) for shape in shapes), lambda_]
    plain = [draw(2 * heads, width), draw(2 * kv_heads, width), draw(2 * kv_heads, width)]
    forms: dict[str, Form] = {PLAIN: (softmax_attention, plain)}
    if arguments.device == "cuda" and dtype != torch.float32 and util.find_spec("flash_attn"):
        flash_attn_func = import_module("flash_attn").flash_attn_func
        forms["transformer_flash"] = (partial(flash_attn_func, causal=True), plain)
    libraries = importable_libraries()
    for name in arguments.backends or BACKENDS:
        reason = why_not(name, arguments.device, dtype, width, libraries)
        if reason is not None:
            print(f"{name}: left out, it {reason}")
        elif name == "triton":
            triton_attention = BACKENDS["triton"].load()
            mask = build_mask(
                length, length, causal=True, cu_seqlens=None, query_offset=None, key_offset=0
            )
            for form, one_pass in (("triton_split", False), ("triton_one_pass", True)):
                function = partial(
                    triton_attention.diff_attention,
                    softmax_scale=width**-0.5,
                    mask=mask,
                    one_pass=one_pass,
                )
                forms[form] = (function, diff)
        else:
            forms[name] = (partial(diff_attention, backend=name), diff)
    return forms


def timed(function: Callable[[], Result], device: str) -> tuple[float, Result]:
    """(seconds, result) of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def measure(forms: dict[str, Form], arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of the forward and the backward of each form, and its peak memory."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    peaks = dict.fromkeys(forms, 0.0)
    warm_up = 2
    for repetition in range(arguments.repetitions + warm_up):
        for name in list(forms):
            function, inputs = forms[name]
            if arguments.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                forward, out = timed(partial(function, *inputs), arguments.device)
                gradient = partial(torch.autograd.grad, out, inputs, torch.ones_like(out))
                backward, _ = timed(gradient, arguments.device)
            except torch.OutOfMemoryError:
                print(f"{name}: left out, out of memory")
                del forms[name], seconds[name]
                continue
            if arguments.device == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            if repetition >= warm_up:
                seconds[name].append((forward, backward))
    return {
        name: {
            "forward_s": statistics.median(forward for forward, _ in pairs),
            "backward_s": statistics.median(backward for _, backward in pairs),
            "both_s": statistics.median(map(sum, pairs)),
            "peak_gib": peaks[name],
        }
        for name, pairs in seconds.items()
    }


def matmul_ceiling(arguments: argparse.Namespace) -> float:
    """TFLOP/s of a large square matmul in the same dtype: what the chip gives at best."""
    size = 8192 if arguments.device == "cuda" else 1024
    dtype = getattr(torch, arguments.dtype)
    a, b = (torch.randn(size, size, device=arguments.device, dtype=dtype) for _ in range(2))
    fastest = min(timed(lambda: a @ b, arguments.device)[0] for _ in range(20))
    return 2 * size**3 / fastest / 1e12


def annotate(
    row: dict[str, float], name: str, length: int, arguments: argparse.Namespace, ceiling: float
) -> None:
    """Add TFLOP/s by the counts above, the share of the ceiling, and the bandwidth achieved."""
    batch = max((arguments.tokens or length) // length, 1)
    pairs = batch * arguments.heads * length * (length + 1) / 2
    forward, backward = (2 * count * arguments.head_dim * pairs for count in COUNTS[name])
    row["forward_tflops"] = forward / row["forward_s"] / 1e12
    row["backward_tflops"] = backward / row["backward_s"] / 1e12
    row["both_tflops"] = (forward + backward) / row["both_s"] / 1e12
    row["share_of_matmul"] = row["both_tflops"] / ceiling
    # The least that must move: q, k, v and out once forward; they and their gradients backward.
    kv_heads = arguments.kv_heads or arguments.heads
    elements = batch * length * arguments.head_dim * 4 * (arguments.heads + kv_heads)
    size = getattr(torch, arguments.dtype).itemsize
    row["both_gb_per_s"] = 3 * elements * size / row["both_s"] / 1e9


def describe_machine(arguments: argparse.Namespace) -> dict[str, str | int]:
    """What the figures depend on."""
    packages = {
        name: metadata.version(name)
        for name in ("torch", "triton", "flash-attn", "flex-head-fa")
        if util.find_spec(name.replace("-", "_"))
    }
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(": ")[1] for line in lines if line.startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else "none"
    return {"cpu": cpu, "threads": torch.get_num_threads(), "gpu": gpu, **packages}


def write_table(path: Path, report: dict) -> None:
    """A Markdown table; ratios are to the plain Transformer's attention of the same run."""
    lines = [
        f"# Attention, {report['settings']}",
        "",
        f"{report['machine']}; matmul ceiling {report['matmul_tflops']:.3g} TFLOP/s",
        "",
        "| length | form | forward ms | backward ms | both ms | ratio | TFLOP/s | of matmul"
        " | GB/s | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for length, rows in report["lengths"].items():
        for name, row in rows.items():
            ratio = row["both_s"] / rows[PLAIN]["both_s"] if PLAIN in rows else float("nan")
            peak = f"{row['peak_gib']:.2f}" if row["peak_gib"] else "not measured"
            lines.append(
                f"| {length} | {name} | {row['forward_s'] * 1e3:.2f} | "
                f"{row['backward_s'] * 1e3:.2f} | {row['both_s'] * 1e3:.2f} | {ratio:.2f} | "
                f"{row['both_tflops']:.3g} | {row['share_of_matmul']:.0%} | "
                f"{row['both_gb_per_s']:.3g} | {peak} |"
            )
    path.write_text("\n".join(lines) + "\n")


def write_plot(path: Path, report: dict) -> None:
    """Time of forward plus backward over the plain Transformer's, by length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    lengths = [n for n, rows in report["lengths"].items() if PLAIN in rows]
    for name in {name: None for n in lengths for name in report["lengths"][n]}:
        rows = {n: report["lengths"][n] for n in lengths if name in report["lengths"][n]}
        ratios = [row[name]["both_s"] / row[PLAIN]["both_s"] for row in rows.values()]
        axes.plot(list(map(str, rows)), ratios, marker="o", label=name)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("forward + backward time / Transformer")
    axes.set_title(report["settings"])
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure every length, then write the three files."""
    arguments = parse_arguments()
    torch.manual_seed(0)
    ceiling = matmul_ceiling(arguments)
    kv_heads = arguments.kv_heads or arguments.heads
    settings = (
        f"{arguments.device}, {arguments.dtype}, causal, h={arguments.heads}, kv={kv_heads}, "
        f"d={arguments.head_dim}, median of {arguments.repetitions}"
    )
    report: dict = {
        "settings": settings,
        "machine": describe_machine(arguments),
        "matmul_tflops": ceiling,
        "lengths": {},
    }
    for length in arguments.lengths:
        rows = measure(build_forms(arguments, length), arguments)
        for name, row in rows.items():
            annotate(row, name, length, arguments, ceiling)
        report["lengths"][length] = rows
        print(length, {name: f"{row['both_s'] * 1e3:.1f} ms" for name, row in rows.items()})
    name = arguments.name or (
        f"attention_{arguments.device}_{arguments.dtype}_d{arguments.head_dim}"
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    write_table(RESULTS / f"{name}.md", report)
    write_plot(RESULTS / f"{name}.png", report)
    print(f"wrote {RESULTS / name}.json, .md and .png")


if __name__ == "__main__":
    main()
