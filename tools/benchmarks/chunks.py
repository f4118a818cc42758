r"""Time the attention of one pair of chunks, the smallest step of ring attention.

A chunk is a range of consecutive positions; in a pair, the queries of one chunk attend to the keys
of the same or an earlier chunk. Each backend that supports chunks is measured: its forward pass by
`chunk_attention`, and its backward pass by `chunk_gradients`, which needs the log-sum-exps over all
keys. A Transformer baseline of equal size is measured too. The repetitions of all backends and
passes alternate. Writes chunks_DEVICE_DTYPE_dD.json to docs/results/, where D is the head width.

    python -m tools.benchmarks chunks                       # on a GPU: bf16, chunks of 4096
    python -m tools.benchmarks chunks --device cpu --dtype float32 --chunk 1024 --heads 4 \
        --head-dim 64
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from diffmegatron.attention.kernels.api import (
    QKV,
    WholeAttention,
    chunk_attention,
    chunk_gradients,
    combine_maps,
)
from diffmegatron.attention.kernels.installed_backends import importable_libraries
from diffmegatron.attention.kernels.registry import DIFFERENTIAL, Call, why_not
from diffmegatron.tuning.timing import timed
from tools.benchmarks.json_report import write_json_report
from tools.benchmarks.machine import default_device, describe_machine
from tools.paths import RESULTS

BASELINE = "transformer"


def draw_maps(arguments: argparse.Namespace, count: int) -> QKV:
    """Draw random queries, keys and values of one or two softmax maps.

    With h = ``--heads`` and d = ``--head-dim``: one map (the Transformer) has 2h heads with values
    of width d. Two maps (differential attention) have h heads each, and share values of width 2d.

    Args:
        arguments: command line.
        count: number of maps, 1 or 2.
    """
    heads = arguments.heads * 2 // count

    def draw(columns: int) -> Tensor:
        shape = (1, arguments.chunk, heads, columns)
        return torch.randn(shape, device=arguments.device, dtype=getattr(torch, arguments.dtype))

    width = arguments.head_dim
    queries, keys = (tuple(draw(width) for _ in range(count)) for _ in range(2))
    return QKV(queries, keys, draw(count * width))


def build_forms(arguments: argparse.Namespace, placed: dict) -> dict[str, Callable[[], object]]:
    """Return the functions to time by name: forward and backward of the baseline and each backend.

    Args:
        arguments: command line.
        placed: keyword arguments of `chunk_attention` that give the positions of the two chunks.
    """
    dtype, width = getattr(torch, arguments.dtype), arguments.head_dim
    forms: dict[str, Callable[[], object]] = {}

    def can(backend: str) -> bool:
        call = Call("differential", arguments.device, arguments.dtype, width, frozenset({"chunks"}))
        return why_not(backend, call, importable_libraries()) is None

    def add(name: str, backend: str, maps: QKV, lambda_: Tensor | None) -> None:
        parts = chunk_attention(maps, backend=backend, **placed)
        outs = [out.to(dtype) for out, _ in parts]
        out = combine_maps(outs, lambda_)
        out2 = None if lambda_ is None else outs[1]
        whole = WholeAttention(out, out2, tuple(lse for _, lse in parts))
        grad = torch.randn_like(out)
        forms[f"{name} forward"] = partial(chunk_attention, maps, backend=backend, **placed)
        forms[f"{name} backward"] = partial(
            chunk_gradients, grad, maps, lambda_, whole, backend=backend, **placed
        )

    add(BASELINE, "auto", draw_maps(arguments, 1), None)
    for backend in DIFFERENTIAL:
        if backend != "reference" and can(backend):
            add(
                backend,
                backend,
                draw_maps(arguments, 2),
                torch.tensor(0.7, device=arguments.device),
            )
    return forms


def measure(forms: dict[str, Callable[[], object]], arguments: argparse.Namespace) -> dict:
    """Time all functions alternately, and return the median seconds of each by name."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    warm_up = 2
    for repetition in range(arguments.repetitions + warm_up):
        for name, function in forms.items():
            elapsed, _ = timed(function, arguments.device)
            if repetition >= warm_up:
                seconds[name].append(elapsed)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main(arguments: argparse.Namespace) -> None:
    """Measure two pairs of chunks, and write the file.

    In the first pair a chunk attends to itself with the causal mask. In the second pair it attends
    to an earlier chunk, all of whose keys are visible.
    """
    arguments.device = arguments.device or default_device()
    torch.manual_seed(0)
    positions = {
        "own chunk": {"causal": True},
        "earlier chunk": {"causal": False, "query_offset": arguments.chunk, "key_offset": 0},
    }
    report = {
        "settings": f"{arguments.device}, {arguments.dtype}, chunk {arguments.chunk}, "
        f"h={arguments.heads}, d={arguments.head_dim}, median of {arguments.repetitions}",
        "machine": describe_machine(arguments.device),
        "seconds": {
            name: measure(build_forms(arguments, placed), arguments)
            for name, placed in positions.items()
        },
    }
    name = arguments.name or (f"chunks_{arguments.device}_{arguments.dtype}_d{arguments.head_dim}")
    write_json_report(RESULTS / f"{name}.json", report)
    for position, rows in report["seconds"].items():
        print(position, {form: f"{seconds * 1e3:.1f} ms" for form, seconds in rows.items()})
    print(f"wrote {RESULTS / name}.json")
