"""Comparison of runs by their recorded metrics: plots, and a table of final values."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from diffmegatron.checkpoint.checkpoint_store import RECIPE
from diffmegatron.checkpoint.stage_folders import only_last, stage_folders
from diffmegatron.config.load import load_resolved
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.evaluation.report_pages import Table, markdown_table
from diffmegatron.evaluation.run_conclusions import RunResult, conclude
from diffmegatron.files import (
    check_replaceable,
    format_path,
    printable,
    shortest_ends,
    write_durably,
    write_picture,
)
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.training.monitoring.metrics import METRICS, Entry, read_metrics
from diffmegatron.training.monitoring.source_losses import SOURCE_LOSS

# Share of the last stage's steps over which the final training losses are averaged.
_LAST_SHARE = 0.1
# Largest number of layers in the legend of a lambda plot; all layers have a curve.
_NAMED_LAYERS = 8


@dataclass(frozen=True)
class RecordedStage:
    """A stage of a run, with its resolved recipe and the entries of ``metrics.jsonl``."""

    recipe: Recipe
    entries: Sequence[Entry]

    @property
    def last_step(self) -> int:
        """Last step that has an entry."""
        return int(max(entry["step"] for entry in self.entries))

    @property
    def tokens(self) -> int:
        """Number of tokens seen in this stage, up to the last entry."""
        return self.last_step * self.recipe.training.tokens_per_step

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return a list of (tokens seen in this stage, value) for the metric ``name``."""
        tokens = self.recipe.training.tokens_per_step
        return [(entry["step"] * tokens, entry[name]) for entry in self.entries if name in entry]

    def names(self, beginning: str) -> list[str]:
        """Return the sorted names of the recorded metrics that begin with ``beginning``."""
        return sorted({n for entry in self.entries for n in entry if n.startswith(beginning)})


@dataclass(frozen=True)
class RecordedRun:
    """The stages of a run that have recorded metrics, in order of training."""

    stages: Sequence[RecordedStage]

    @property
    def starts(self) -> list[int]:
        """Number of tokens that the run had seen at the start of each stage."""
        return [0, *accumulate(stage.tokens for stage in self.stages[:-1])]

    @property
    def lambdas(self) -> list[str]:
        """Sorted names of the metrics of lambda, such as ``attn/lambda_layer_01`` of layer 1."""
        return sorted({n for stage in self.stages for n in stage.names("attn/lambda_layer_")})

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return a list of (tokens seen since the run began, value) for the metric ``name``."""
        return [
            (start + tokens, value)
            for start, stage in zip(self.starts, self.stages, strict=True)
            for tokens, value in stage.series(name)
        ]


def compare(run_dirs: Sequence[Path], out: Path) -> tuple[list[str], Table]:
    """Compare runs, and write ``compare.json``, ``compare.md`` and ``compare.png`` into ``out``.

    For a run with stages, give the folder that contains the folders of the stages. Returns the
    sentences of the conclusion, with which ``compare.md`` begins, and a table with a row per value
    of :func:`final_figures` and a column per run.
    """
    runs = dict(zip(short_names(run_dirs), map(read_run, run_dirs), strict=True))
    figures = {name: final_figures(run) for name, run in runs.items()}
    out.mkdir(parents=True, exist_ok=True)
    picture, page, numbers = (out / f"compare.{suffix}" for suffix in ("png", "md", "json"))
    check_replaceable(picture, page, numbers)
    names = dict.fromkeys(name for run in figures.values() for name in run)
    rows = [[name, *(_shown(run.get(name)) for run in figures.values())] for name in names]
    table = ["", *figures], rows
    conclusion = conclude([_result(run, figures[name]) for name, run in runs.items()])
    listed = "\n".join(f"- {sentence}" for sentence in conclusion)
    parts = ["# Runs compared", listed, markdown_table(table), "![curves](compare.png)"]
    plot_runs(picture, runs)
    write_durably(page, ("\n\n".join(parts) + "\n").encode())
    write_durably(numbers, json.dumps(figures, indent=1).encode() + b"\n")
    return conclusion, table


def _result(run: RecordedRun, figures: Mapping[str, Any]) -> RunResult:
    recipes = [stage.recipe for stage in run.stages]
    data = {
        f"data.{key}": [getattr(recipe.data, key) for recipe in recipes]
        for key in ("tokenizer", "sources", "validation_fraction", "test_fraction", "split_seed")
    }
    data["training.seq_length"] = [recipe.training.seq_length for recipe in recipes]
    return RunResult(
        attention=figures["attention"],
        parameters=figures["parameters"],
        tokens=figures["tokens"],
        seed=recipes[-1].training.seed,
        figures=figures,
        data=data,
    )


def read_run(run_dir: Path) -> RecordedRun:
    """Read the recipe and the metrics of each stage of a run; leave out stages without metrics."""
    folders = stage_folders(run_dir, RECIPE)
    only_last(folders)
    stages = [
        RecordedStage(load_resolved(folder.run_dir / RECIPE), read_metrics(folder.run_dir))
        for folder in folders
    ]
    if not any(stage.entries for stage in stages):
        raise UserError(
            f"{format_path(folders[0].run_dir / METRICS)} has no entries; train the run for a step "
            "first"
        )
    return RecordedRun([stage for stage in stages if stage.entries])


def short_names(run_dirs: Sequence[Path]) -> list[str]:
    """Return a name for each run: the shortest end of its path that is unique among the paths."""
    paths = [path.absolute().resolve() for path in run_dirs]
    if len(set(paths)) < len(paths):
        twice = next(path for n, path in enumerate(run_dirs) if paths[n] in paths[:n])
        raise UserError(f"{format_path(twice)} is given twice; give each run once")
    return [printable(end) for end in shortest_ends(paths)]


def final_figures(run: RecordedRun) -> dict[str, Any]:
    """Return the final values of a run by name, without values that were not recorded.

    ``steps`` and ``tokens`` are sums over all stages. ``stages`` has the names of the stages, if
    there are several. All other values describe the last stage.
    """
    last = run.stages[-1]
    model, names = last.recipe.model, [Path(stage.recipe.run_dir).name for stage in run.stages]
    figures: dict[str, Any] = {
        "attention": model.attention.title,
        "parameters": count_parameters(model).total,
        **({"stages": ", ".join(names)} if len(names) > 1 else {}),
        "steps": sum(stage.last_step for stage in run.stages),
        "tokens": sum(stage.tokens for stage in run.stages),
    }
    figures |= _training_losses(last, last.last_step * (1 - _LAST_SHARE))
    for name in ("valid/", "eval/"):
        figures |= {each: last.series(each)[-1][1] for each in last.names(name)}
    lambdas = [last.series(name)[-1][1] for name in last.names("attn/lambda_layer_")]
    if lambdas:
        figures["lambda, mean of the layers"] = statistics.mean(lambdas)
    speeds = [speed for _, speed in last.series("perf/tokens_per_second")]
    if speeds:
        figures["tokens per second"] = round(statistics.median(speeds))
    memory = [peak for _, peak in last.series("mem/peak_gib")]
    if memory:
        figures["peak memory, GiB"] = max(memory)
    return figures


def _training_losses(stage: RecordedStage, after_step: float) -> dict[str, float]:
    """Return the mean losses per token, of all data and of each source.

    Only records of steps after ``after_step`` count, weighted by their numbers of tokens.
    """
    losses = {}
    for loss in ("train/loss", *stage.names(SOURCE_LOSS)):
        name = loss.replace("train/loss", "train/loss_tokens", 1)
        # Records of older versions lack the number of tokens of the whole batch.
        ending = [
            (entry.get(name, stage.recipe.training.tokens_per_step), entry[loss])
            for entry in stage.entries
            if entry["step"] > after_step and loss in entry
        ]
        if total := sum(tokens for tokens, _ in ending):
            losses[loss] = sum(tokens * each for tokens, each in ending) / total
    return losses


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plot_runs(path: Path, runs: Mapping[str, RecordedRun], has_throughput: bool = True) -> None:
    """Plot losses, throughput, and lambda per layer of ``runs`` (by name) into a PNG file.

    ``has_throughput``: whether to plot tokens per second, whose comparison needs an idle machine.
    """
    plots = [_plot_losses, _plot_throughput] if has_throughput else [_plot_losses]
    with_lambda = [name for name, run in runs.items() if run.lambdas]
    count = len(with_lambda)
    if count < 2:
        figure = Figure(figsize=(4.5 * (len(plots) + count), 3.6), layout="constrained")
        panels = [*figure.subplots(1, len(plots) + count, squeeze=False)[0]]
    else:
        figure = Figure(figsize=(5.5 * count, 8.4), layout="constrained")
        upper, lower = figure.subfigures(2, 1, squeeze=False)[:, 0]
        panels = [*upper.subplots(1, len(plots), squeeze=False)[0]]
        panels += [*lower.subplots(1, count, sharey=True)]
    for axes, plot in zip(panels, plots, strict=False):
        plot(axes, runs)
    for axes, name in zip(panels[len(plots) :], with_lambda, strict=True):
        _plot_lambdas(axes, name, runs[name])
    write_picture(path, figure)


def _plot_losses(axes: Axes, runs: Mapping[str, RecordedRun]) -> None:
    for name, run in runs.items():
        (line,) = axes.plot(*_columns(run, "train/loss"), label=f"{name}, training", alpha=0.6)
        color = line.get_color()
        axes.plot(*_columns(run, "valid/loss"), "o--", color=color, label=f"{name}, held out")
        _mark_stages(axes, run, color)
    _label(axes, "Loss", "nats per token")
    axes.legend()


def _plot_throughput(axes: Axes, runs: Mapping[str, RecordedRun]) -> None:
    for name, run in runs.items():
        (line,) = axes.plot(*_columns(run, "perf/tokens_per_second"), label=name)
        _mark_stages(axes, run, line.get_color())
    _label(axes, "Throughput", "tokens per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend()


def _plot_lambdas(axes: Axes, title: str, run: RecordedRun) -> None:
    colors, lambdas = colormaps["viridis"], run.lambdas
    _mark_stages(axes, run, "gray")
    for number, name in enumerate(lambdas):
        layer = int(name.rpartition("_")[2])
        is_named = number % -(-len(lambdas) // _NAMED_LAYERS) == 0
        color = colors(0.9 * number / max(1, len(lambdas) - 1))
        axes.plot(*_columns(run, name), color=color, label=f"layer {layer}" if is_named else None)
    _label(axes, f"{title}: $\\lambda$ per layer", "$\\lambda$")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _mark_stages(axes: Axes, run: RecordedRun, color: str) -> None:
    for start in run.starts[1:]:
        axes.axvline(start, color=color, linestyle=":", linewidth=1)


def _label(axes: Axes, title: str, values: str) -> None:
    axes.set(title=title, xlabel="tokens", ylabel=values)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


def _columns(run: RecordedRun, name: str) -> tuple[list[float], list[float]]:
    series = run.series(name)
    return [place for place, _ in series], [value for _, value in series]
