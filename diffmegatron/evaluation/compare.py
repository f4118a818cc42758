"""Runs side by side, from what they recorded: curves, lambda, throughput and final figures."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffmegatron.checkpoint.checkpoint_format import RECIPE
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.evaluation.plots import Curves, plot_runs
from diffmegatron.evaluation.report_pages import Table, markdown_table
from diffmegatron.files import shown, write_durably
from diffmegatron.model.accounting import count_parameters
from diffmegatron.training.monitoring.metrics import METRICS, Entry, read_metrics

# Of the end of a run, over which its last training loss is averaged: one batch says little.
_LAST_SHARE = 0.1


@dataclass(frozen=True)
class RecordedRun:
    """What a run left of itself: the resolved recipe and the entries of ``metrics.jsonl``."""

    recipe: Recipe
    entries: Sequence[Entry]

    def series(self, name: str) -> list[tuple[float, float]]:
        """(tokens seen, value) wherever the run recorded this metric."""
        tokens = self.recipe.training.tokens_per_step
        return [(entry["step"] * tokens, entry[name]) for entry in self.entries if name in entry]


def compare(run_dirs: Sequence[Path], out: Path) -> Table:
    """Write ``compare.json``, ``compare.md`` and ``compare.png`` of some runs into ``out``.

    Args:
        run_dirs: of runs of any recipes, finished or not; the first comes first.
        out: directory, made if it is missing; files of an earlier comparison are replaced.

    Returns:
        The final figures: a row for each, a column for each run.

    Raises:
        UserError: a run_dir has no recipe or recorded nothing, or is given twice.
    """
    runs = dict(zip(short_names(run_dirs), map(read_run, run_dirs), strict=True))
    figures = {name: final_figures(run) for name, run in runs.items()}
    out.mkdir(parents=True, exist_ok=True)
    table = figures_table(figures)
    text = "# Runs compared\n\n" + markdown_table(table) + "\n\n![curves](compare.png)\n"
    plot_runs(out / "compare.png", {name: curves_of(run) for name, run in runs.items()})
    write_durably(out / "compare.md", text.encode())
    write_durably(out / "compare.json", json.dumps(figures, indent=1).encode() + b"\n")
    return table


def read_run(run_dir: Path) -> RecordedRun:
    """The recipe and the metrics of a run.

    Raises:
        UserError: one of them is missing or cannot be read.
    """
    for name in (RECIPE, METRICS):
        if not (run_dir / name).is_file():
            raise UserError(
                f"{shown(run_dir)} has no {name}; give the run_dir of a run that has begun, of a "
                "recipe with stages that of one stage"
            )
    if not (entries := read_metrics(run_dir)):
        raise UserError(f"{shown(run_dir / METRICS)} has no entries; the run has not made a step")
    return RecordedRun(load_recipe(run_dir / RECIPE, to_plan=True), entries)


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    Raises:
        UserError: two are the same folder.
    """
    parts = [path.absolute().resolve().parts for path in run_dirs]
    if len(set(parts)) < len(parts):
        twice = next(path for n, path in enumerate(run_dirs) if parts[n] in parts[:n])
        raise UserError(f"{shown(twice)} is given twice; give runs that differ")
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def curves_of(run: RecordedRun) -> Curves:
    """What the picture shows of a run."""
    return Curves(
        losses=run.series("train/loss"),
        held_out=run.series("valid/loss"),
        throughput=run.series("perf/tokens_per_second"),
        lambdas={name: run.series(name) for name in _names(run, "attn/lambda_layer_")},
    )


def final_figures(run: RecordedRun) -> dict[str, Any]:
    """Figures of a run by their name; those that it did not record are left out.

    The last training loss is the mean over the last tenth of the steps, throughput the median of
    what was recorded; the others are the last that was recorded.
    """
    model, last_step = run.recipe.model, max(entry["step"] for entry in run.entries)
    figures: dict[str, Any] = {
        "attention": model.attention.title,
        "parameters": count_parameters(model).total,
        "steps": last_step,
        "tokens": last_step * run.recipe.training.tokens_per_step,
    }
    losses = run.series("train/loss")
    ending = [loss for tokens, loss in losses if tokens > figures["tokens"] * (1 - _LAST_SHARE)]
    if ending:
        figures["train/loss"] = statistics.mean(ending)
    for name in ("valid/", "eval/"):
        figures |= {each: run.series(each)[-1][1] for each in _names(run, name)}
    lambdas = [run.series(name)[-1][1] for name in _names(run, "attn/lambda_layer_")]
    if lambdas:
        figures["lambda, mean of the layers"] = statistics.mean(lambdas)
    speeds = [speed for _, speed in run.series("perf/tokens_per_second")]
    if speeds:
        figures["tokens per second"] = round(statistics.median(speeds))
    memory = [peak for _, peak in run.series("mem/peak_gib")]
    if memory:
        figures["peak memory, GiB"] = max(memory)
    return figures


def figures_table(figures: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row for each figure that any run has, in their order, a column for each run."""
    names = dict.fromkeys(name for run in figures.values() for name in run)
    rows = [[name, *(_shown(run.get(name)) for run in figures.values())] for name in names]
    return ["", *figures], rows


def _names(run: RecordedRun, beginning: str) -> list[str]:
    return sorted({name for entry in run.entries for name in entry if name.startswith(beginning)})


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
