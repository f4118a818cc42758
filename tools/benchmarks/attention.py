r"""Time differential attention backends and a plain Transformer's attention in one run.

A form is one implementation of attention: a backend or one of its variants. All forms have equal
model size: h differential heads with queries and keys of width d and values of width 2d, or a
Transformer's 2h heads of width d. The repetitions of all forms alternate, so that a machine that
slows down affects all of them. Writes NAME.json, NAME.md and NAME.png to docs/results/.

    python -m tools.benchmarks attention                       # on a GPU: bf16, 2K to 64K
    OMP_NUM_THREADS=1 python -m tools.benchmarks attention --device cpu --dtype float32 \
        --lengths 1024 2048 4096 --heads 4 --repetitions 15 --backends blocked sdpa_4call
"""

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module, util
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffmegatron.attention.kernels.api import diff_attention, softmax_attention
from diffmegatron.attention.kernels.costs import Sizes, triton_work
from diffmegatron.attention.kernels.installed_backends import importable_libraries
from diffmegatron.attention.kernels.registry import DIFFERENTIAL, SOFTMAX, Call, why_not
from diffmegatron.tuning.timing import timed
from tools.benchmarks.json_report import write_json_report
from tools.benchmarks.machine import default_device, describe_machine
from tools.paths import RESULTS

# Name of the form that computes a Transformer's attention by torch's scaled_dot_product_attention.
# On a GPU with a 16-bit dtype, it uses torch's flash kernel.
PLAIN = "transformer_sdpa"
# Backends that use only PyTorch operations. On a GPU they are timed only on request.
PLAIN_PYTORCH = ("reference", "blocked")

# For each form, a function that returns the multiply-adds per pair of a query and a visible key, as
# a tuple (forward, backward). Each number is the sum over all heads.
FORMS = {
    PLAIN: SOFTMAX["sdpa"].work,
    "transformer_flash": SOFTMAX["flash_attn"].work,
    "transformer_cudnn": SOFTMAX["sdpa"].work,
    "triton_split": partial(triton_work, one_pass=False),
    "triton_one_pass": partial(triton_work, one_pass=True),
    **{name: backend.work for name, backend in DIFFERENTIAL.items() if name != "triton"},
}

Form = tuple[Callable[..., Tensor], list[Tensor]]


def tokens_per_batch(arguments: argparse.Namespace) -> int | None:
    """Return the number of tokens in every batch; None if each batch is a single sequence."""
    longest = max(arguments.lengths) if arguments.device == "cuda" else None
    return arguments.tokens or longest


def batch_size(arguments: argparse.Namespace, length: int) -> int:
    """Return the number of sequences of this length per batch, at least 1."""
    return max((tokens_per_batch(arguments) or length) // length, 1)


def backends_to_time(arguments: argparse.Namespace) -> list[str]:
    """Return the names of the requested backends that can run; print why each other one cannot.

    The requested backends are those of ``--backends``. By default they are all differential
    backends, on a GPU without those of ``PLAIN_PYTORCH``.
    """
    on_gpu = arguments.device == "cuda"
    by_default = [name for name in DIFFERENTIAL if not (on_gpu and name in PLAIN_PYTORCH)]
    call = Call("differential", arguments.device, arguments.dtype, arguments.head_dim)
    can_run = []
    for name in arguments.backends or by_default:
        reason = why_not(name, call, importable_libraries())
        if reason is None:
            can_run.append(name)
        else:
            print(f"{name}: left out, it {reason}")
    return can_run


def attend_by(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the Transformer baseline's attention with one kernel of torch's SDPA."""
    with sdpa_kernel(kernel):
        return softmax_attention(q, k, v)


def build_forms(arguments: argparse.Namespace, backends: list[str], length: int) -> dict[str, Form]:
    """Return a dict from the name of each form to its function and random inputs.

    Args:
        arguments: command line.
        backends: differential backends to time.
        length: sequence length of the inputs.
    """
    dtype = getattr(torch, arguments.dtype)
    batch = batch_size(arguments, length)
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
    if arguments.device == "cuda" and dtype != torch.float32:
        # Name the kernels, because torch's own choice of a kernel varies between versions.
        forms[PLAIN] = (partial(attend_by, SDPBackend.FLASH_ATTENTION), plain)
        forms["transformer_cudnn"] = (partial(attend_by, SDPBackend.CUDNN_ATTENTION), plain)
        if util.find_spec("flash_attn"):
            flash_attn_func = import_module("flash_attn").flash_attn_func
            forms["transformer_flash"] = (partial(flash_attn_func, causal=True), plain)
    for name in backends:
        configured = ("triton:split", "triton:one_pass") if name == "triton" else (name,)
        for each in configured:
            forms[each.replace(":", "_")] = (partial(diff_attention, backend=each), diff)
    return forms


def run_once(form: Form, device: str) -> tuple[float, float, float]:
    """Return forward seconds, backward seconds, and the peak GiB in addition to the inputs.

    On a CPU the peak is not measured, and 0 is returned for it.
    """
    function, inputs = form
    held = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    forward, out = timed(partial(function, *inputs), device)
    # Gradients are random because a GPU's matrix units draw less power, and are faster, with
    # constant data.
    gradient = partial(torch.autograd.grad, out, inputs, torch.randn_like(out))
    backward, _ = timed(gradient, device)
    peak = torch.cuda.max_memory_allocated() - held if device == "cuda" else 0
    return forward, backward, peak / 2**30


def measure(
    forms: dict[str, Form], arguments: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Time all forms alternately.

    Returns:
        Two dicts by form. The first has the median seconds and peak memory of each form that ran,
        the second the error message of each form that failed.
    """
    runs: dict[str, list[tuple[float, float, float]]] = {name: [] for name in forms}
    failures: dict[str, str] = {}
    warm_up = 2
    for repetition in range(arguments.repetitions + warm_up):
        for name in [name for name in forms if name not in failures]:
            try:
                run = run_once(forms[name], arguments.device)
            except Exception as error:  # A failure in a library must not stop the other forms.
                failures[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                print(f"{name}: left out, {failures[name]}")
                continue
            if repetition >= warm_up:
                runs[name].append(run)
    rows = {
        name: {
            "forward_s": statistics.median(forward for forward, _, _ in each),
            "backward_s": statistics.median(backward for _, backward, _ in each),
            "both_s": statistics.median(forward + backward for forward, backward, _ in each),
            "peak_gib": max(peak for _, _, peak in each),
        }
        for name, each in runs.items()
        if name not in failures
    }
    return rows, failures


def matmul_ceiling(arguments: argparse.Namespace) -> float:
    """Return the TFLOP/s of a large square matmul in the same dtype, the fastest of 20 runs.

    Attention is expected to stay below this rate.
    """
    size = 8192 if arguments.device == "cuda" else 1024
    dtype = getattr(torch, arguments.dtype)
    a, b = (torch.randn(size, size, device=arguments.device, dtype=dtype) for _ in range(2))
    fastest = min(timed(lambda: a @ b, arguments.device)[0] for _ in range(20))
    return 2 * size**3 / fastest / 1e12


def annotate(
    row: dict[str, float], name: str, length: int, arguments: argparse.Namespace, ceiling: float
) -> None:
    """Add derived figures to a form's row: TFLOP/s, its share of the matmul ceiling, and GB/s.

    Args:
        row: measured seconds and memory of the form; the derived figures are added to it.
        name: name of the form.
        length: sequence length.
        arguments: command line.
        ceiling: TFLOP/s of a large matmul.
    """
    batch = batch_size(arguments, length)
    pairs = batch * length * (length + 1) / 2
    heads, element = arguments.heads, getattr(torch, arguments.dtype).itemsize
    kv_heads = arguments.kv_heads or heads
    # Differential attention has two maps of h heads each, a Transformer one map of 2h heads.
    signal, noise = (2 * heads, 0) if name.startswith("transformer") else (heads, heads)
    work = FORMS[name](Sizes(element, arguments.head_dim, signal, noise, kv_heads, length))
    forward, backward = (2 * multiply_adds * pairs for multiply_adds in work)
    row["forward_tflops"] = forward / row["forward_s"] / 1e12
    row["backward_tflops"] = backward / row["backward_s"] / 1e12
    row["both_tflops"] = (forward + backward) / row["both_s"] / 1e12
    row["share_of_matmul"] = row["both_tflops"] / ceiling
    # Minimum traffic. The forward pass moves q, k, v and out once; the backward pass moves them and
    # their gradients once each, which is twice as much. All of q, k, v and out together have
    # 4 d (h + kv_heads) elements per token.
    elements = batch * length * arguments.head_dim * 4 * (arguments.heads + kv_heads)
    row["both_gb_per_s"] = 3 * elements * element / row["both_s"] / 1e9


def transformer_seconds(rows: dict[str, dict[str, float]]) -> float:
    """Return the seconds of the fastest form of a Transformer's attention; NaN if none ran."""
    transformers = (row["both_s"] for name, row in rows.items() if name.startswith("transformer"))
    return min(transformers, default=math.nan)


def write_table(path: Path, report: dict) -> None:
    """Write a Markdown table of all forms by length.

    Its column ``ratio`` is the time divided by the time of the fastest Transformer form.

    Args:
        path: file to write.
        report: settings, machine and rows by sequence length.
    """
    lines = [
        f"# Attention, {report['settings']}",
        "",
        f"{report['machine']}; matmul ceiling {report['matmul_tflops']:.3g} TFLOP/s",
        "",
        "| length | form | forward ms | backward ms | both ms | ratio | TFLOP/s | of matmul"
        " | GB/s | peak GiB beside inputs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for length, rows in report["lengths"].items():
        for name, row in rows.items():
            ratio = row["both_s"] / transformer_seconds(rows)
            peak = f"{row['peak_gib']:.2f}" if row["peak_gib"] else "not measured"
            lines.append(
                f"| {length} | {name} | {row['forward_s'] * 1e3:.2f} | "
                f"{row['backward_s'] * 1e3:.2f} | {row['both_s'] * 1e3:.2f} | {ratio:.2f} | "
                f"{row['both_tflops']:.3g} | {row['share_of_matmul']:.0%} | "
                f"{row['both_gb_per_s']:.3g} | {peak} |"
            )
    path.write_text("\n".join(lines) + "\n")


def write_plot(path: Path, report: dict) -> None:
    """Plot forward plus backward time by length, relative to the fastest Transformer form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    lengths = [n for n, rows in report["lengths"].items() if transformer_seconds(rows) > 0]
    for name in {name: None for n in lengths for name in report["lengths"][n]}:
        rows = {n: report["lengths"][n] for n in lengths if name in report["lengths"][n]}
        ratios = [row[name]["both_s"] / transformer_seconds(row) for row in rows.values()]
        # A form has the same colour in every plot.
        color = pyplot.get_cmap("tab20")(list(FORMS).index(name))
        axes.plot(list(map(str, rows)), ratios, marker="o", label=name, color=color)
    axes.set_xlabel("sequence length (tokens)")
    axes.set_ylabel("forward + backward time / fastest Transformer")
    machine = report["machine"]
    where = machine["cpu"] if machine["gpu"] == "none" else machine["gpu"]
    threads = f", threads: {machine['threads']}" if machine["gpu"] == "none" else ""
    axes.set_title(f"{report['settings']}\n{where}{threads}, torch {machine['torch']}", size=10)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: argparse.Namespace) -> None:
    """Measure each length, and write the files after each."""
    arguments.device = arguments.device or default_device()
    torch.manual_seed(0)
    ceiling = matmul_ceiling(arguments)
    kv_heads = arguments.kv_heads or arguments.heads
    tokens = tokens_per_batch(arguments)
    filled = "one sequence" if tokens is None else f"{tokens} tokens a batch"
    settings = (
        f"{arguments.device}, {arguments.dtype}, causal, h={arguments.heads}, kv={kv_heads}, "
        f"d={arguments.head_dim}, {filled}, "
        f"median of {arguments.repetitions}"
    )
    name = arguments.name or (
        f"attention_{arguments.device}_{arguments.dtype}_d{arguments.head_dim}"
    )
    report: dict = {
        "settings": settings,
        "machine": describe_machine(arguments.device),
        "matmul_tflops": ceiling,
        "lengths": {},
        "failures": {},
    }
    backends = backends_to_time(arguments)
    for length in arguments.lengths:
        # Training compiles kernels for its one length. Without this reset, torch would compile
        # kernels that accept any length when the second length comes.
        torch.compiler.reset()
        rows, failures = measure(build_forms(arguments, backends, length), arguments)
        for form, row in rows.items():
            annotate(row, form, length, arguments, ceiling)
        report["lengths"][length] = rows
        report["failures"][length] = failures
        write(name, report)
        print(length, {form: f"{row['both_s'] * 1e3:.1f} ms" for form, row in rows.items()})
    print(f"wrote {RESULTS / name}.json, .md and .png")


def write(name: str, report: dict) -> None:
    """Write the JSON, Markdown and PNG file with the lengths measured so far."""
    write_json_report(RESULTS / f"{name}.json", report)
    write_table(RESULTS / f"{name}.md", report)
    write_plot(RESULTS / f"{name}.png", report)
