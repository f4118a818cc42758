"""Pictures of recorded runs: losses, throughput and lambda over the number of tokens seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from diffmegatron.files import write_picture

# Points (tokens seen, value) of one metric.
Series = Sequence[tuple[float, float]]

# Largest number of layers in the legend of a lambda plot; all layers have a curve.
_NAMED_LAYERS = 8


@dataclass(frozen=True)
class Curves:
    """Curves of a run; losses are in nats per token.

    ``lambdas`` maps metrics, which end with ``_`` and a layer's number, to lambda; it may be empty.
    ``stage_starts`` has the number of tokens seen at the start of each stage except the first.
    """

    losses: Series
    held_out: Series
    throughput: Series
    lambdas: Mapping[str, Series]
    stage_starts: Sequence[float] = ()


def plot_runs(path: Path, runs: Mapping[str, Curves]) -> None:
    """Write a PNG file with losses and throughput of runs by name, and lambda of their layers."""
    with_lambda = [name for name, curves in runs.items() if curves.lambdas]
    rows, columns = (2 if with_lambda else 1), max(2, len(with_lambda))
    figure = Figure(figsize=(5.5 * columns, 4.2 * rows), layout="constrained")
    upper, *lower = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    losses, throughput = upper.subplots(1, 2)
    _plot_losses(losses, runs)
    _plot_throughput(throughput, runs)
    if with_lambda:
        panels = lower[0].subplots(1, len(with_lambda), sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, with_lambda, strict=True):
            _plot_lambdas(axes, name, runs[name])
    write_picture(path, figure)


def _plot_losses(axes: Axes, runs: Mapping[str, Curves]) -> None:
    for name, curves in runs.items():
        (line,) = axes.plot(*_columns(curves.losses), label=f"{name}, training", alpha=0.6)
        color = line.get_color()
        axes.plot(*_columns(curves.held_out), "o--", color=color, label=f"{name}, held out")
        _mark_stages(axes, curves, color)
    _label(axes, "Loss", "nats per token")
    axes.legend()


def _plot_throughput(axes: Axes, runs: Mapping[str, Curves]) -> None:
    for name, curves in runs.items():
        (line,) = axes.plot(*_columns(curves.throughput), label=name)
        _mark_stages(axes, curves, line.get_color())
    _label(axes, "Throughput", "tokens per second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend()


def _plot_lambdas(axes: Axes, run: str, curves: Curves) -> None:
    colors, lambdas = colormaps["viridis"], curves.lambdas
    _mark_stages(axes, curves, "gray")
    for number, (name, series) in enumerate(lambdas.items()):
        layer = int(name.rpartition("_")[2])
        is_named = number % -(-len(lambdas) // _NAMED_LAYERS) == 0
        color = colors(0.9 * number / max(1, len(lambdas) - 1))
        axes.plot(*_columns(series), color=color, label=f"layer {layer}" if is_named else None)
    _label(axes, f"{run}: $\\lambda$ per layer", "$\\lambda$")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _mark_stages(axes: Axes, curves: Curves, color: str) -> None:
    for start in curves.stage_starts:
        axes.axvline(start, color=color, linestyle=":", linewidth=1)


def _label(axes: Axes, title: str, values: str) -> None:
    axes.set(title=title, xlabel="tokens", ylabel=values)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)


def _columns(series: Series) -> tuple[list[float], list[float]]:
    return [place for place, _ in series], [value for _, value in series]
