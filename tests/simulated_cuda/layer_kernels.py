"""Count the kernels that a layer launches: ``python -m tests.simulated_cuda.layer_kernels``.

Each recipe of :data:`RECIPES` and its baseline, a Transformer of the same width, train on a
simulated GPU with one layer and with two layers. The difference of the two counts is the count of
one layer. Each of these counts as one kernel:

- an operation of torch that is not a view (torch's flash attention is one operation per pass),
- a launch of a Triton kernel,
- a function that ``torch.compile`` fuses.

The bytes of a kernel are the bytes of the whole tensors that the kernel reads and writes.
``docs/results/layer_kernels.json`` lists every kernel. ``docs/results/layer_kernels.md`` has sums
and comparisons. The command needs about a minute on one core.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version

from tests.paths import RESULTS
from tests.simulated_cuda.simulate import Case, Recording, simulate

JSON = RESULTS / "layer_kernels.json"
RECIPES = {
    "diff_v1": "configs/at_scale/diff_3b_64gpus.yaml",
    "diff_v2": "configs/at_scale/diff_v2_3b_64gpus.yaml",
    "grouped": "configs/at_scale/grouped_3b_64gpus.yaml",
}
BASELINE = "Transformer"
# Backends (kernel implementations) to count for each recipe; each is a column of the table.
BACKENDS = {
    "diff_v1": ("triton", "sdpa_4call"),
    "diff_v2": ("triton", "sdpa"),
    "grouped": ("triton", "sdpa_4call"),
}
PASSES = ("forward", "backward", "update")
# The kernels of attention. All other kernels are outside of attention.
ATTENTION = {
    "forward_kernel", "preprocess_kernel", "dkdv_kernel", "dq_kernel",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_backward",
}  # fmt: skip
# Without overlap, gradients are summed over ranks in the phase "update", once per step, so the
# kernels of this sum count as "update" and not as "backward".
SETTINGS = ("parallel.overlap_gradients=false",)

Work = dict[tuple[str, str], tuple[int, int]]


def main() -> None:
    """Count the kernels, print the tables, and write both files."""
    argparse.ArgumentParser(
        prog="python -m tests.simulated_cuda.layer_kernels",
        description="Count the kernels of a layer of each kind; write "
        "docs/results/layer_kernels.json and .md.",
    ).parse_args()
    columns = dict(_columns())
    cases = [
        Case(recipe, 64, (*overrides, *SETTINGS, f"model.num_layers={layers}"))
        for recipe, overrides in columns.values()
        for layers in (1, 2)
    ]
    found = simulate(cases)
    works = {
        name: _difference(*found[2 * number : 2 * number + 2])
        for number, name in enumerate(columns)
    }
    report = {
        "command": f"python -m {__spec__.name}",
        "versions": {name: version(name) for name in ("torch", "megatron-core", "deepspeed")},
        "columns": {name: {"recipe": case[0], "with": case[1]} for name, case in columns.items()},
        "kernels": {
            name: [
                {"pass": when, "kernel": kernel, "count": count, "bytes": size}
                for (when, kernel), (count, size) in work.items()
            ]
            for name, work in works.items()
        },
    }
    table = markdown(works)
    JSON.write_text(json.dumps(report, indent=1) + "\n")
    JSON.with_suffix(".md").write_text(table)
    print(table)


def _columns() -> Iterator[tuple[str, tuple[str, tuple[str, ...]]]]:
    """Yield the name of each column of the table with its recipe and overrides."""
    for kind, recipe in RECIPES.items():
        for backend in BACKENDS[kind]:
            yield f"{kind}, {backend}", (recipe, (f"training.attention_backend={backend}",))
        yield f"{BASELINE} of {kind}", (recipe, ("model.baseline=true",))


def _difference(smaller: Recording, larger: Recording) -> Work:
    """Return launches and bytes by (pass, kernel) of the one layer that only ``larger`` has."""
    counts, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for sign, recording in ((1, larger), (-1, smaller)):
        for each in recording.launches:
            if each.phase == "update":
                key = "update", each.kernel
            elif each.phase == "forward_backward":
                # The layers are not recomputed, so only kernels of the forward pass have a module.
                key = "forward" if each.module else "backward", each.kernel
            else:
                continue
            counts[key] += sign * each.count
            sizes[key] += sign * each.bytes
    keys = [key for key in sorted(counts) if counts[key] or sizes[key]]
    return {key: (counts[key], sizes[key]) for key in keys}


def outside(work: Work, *passes: str) -> tuple[int, int]:
    """Return launches and bytes outside of attention, summed over the given passes."""
    chosen = [each for key, each in work.items() if key[0] in passes and key[1] not in ATTENTION]
    return sum(count for count, _ in chosen), sum(size for _, size in chosen)


def markdown(works: dict[str, Work]) -> str:
    """Return two Markdown tables: sums outside of attention, and launches that differ.

    Both tables compare each recipe with the Transformer of the same width.
    """
    names = [name for name in works if not name.startswith(BASELINE)]
    baselines = {name: f"{BASELINE} of {name.split(',')[0]}" for name in names}
    lines = [
        "A layer of the 3B recipes of `configs/at_scale/`, one microbatch of 4,096 tokens in bf16 "
        "on one of 64 GPUs: kernels launched and MiB that they read and write, beside its "
        "Transformer's",
        "",
        f"| outside the attention kernels | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for label, passes in (*((each, (each,)) for each in PASSES), ("ratio", PASSES[:2])):
        cells = [
            _compared(outside(works[n], *passes), outside(works[baselines[n]], *passes))
            if label != "ratio"
            else _ratio(outside(works[n], *passes), outside(works[baselines[n]], *passes))
            for n in names
        ]
        title = "forward and backward, ratio of kernels" if label == "ratio" else label
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += [
        "",
        f"| kernel, where a kind differs from its Transformer | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    keys = sorted({key for work in works.values() for key in work}, key=_place)
    for when, kernel in keys:
        found = [
            _change(works[n].get((when, kernel)), works[baselines[n]].get((when, kernel)))
            for n in names
        ]
        if any(found):
            lines.append(f"| {when}: `{kernel}` | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def _place(key: tuple[str, str]) -> tuple[int, bool, str]:
    return PASSES.index(key[0]), key[1] not in ATTENTION, key[1]


def _compared(own: tuple[int, int], other: tuple[int, int]) -> str:
    return f"{own[0]}, {own[1] / 2**20:.0f} ({other[0]}, {other[1] / 2**20:.0f})"


def _ratio(own: tuple[int, int], other: tuple[int, int]) -> str:
    return f"{own[0] / other[0]:.2f}"


def _change(own: tuple[int, int] | None, other: tuple[int, int] | None) -> str:
    """Return launches and MiB minus the Transformer's; an empty text if the launches are equal."""
    count, size = ((own or (0, 0))[i] - (other or (0, 0))[i] for i in (0, 1))
    return f"{count:+d}, {size / 2**20:+.0f}" if count else ""


if __name__ == "__main__":
    main()
