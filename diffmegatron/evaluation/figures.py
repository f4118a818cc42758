"""Plots for suites (benchmarks): bars and curves with 95% intervals, and colour maps.

A target is a model to evaluate.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from diffmegatron.evaluation.bootstrap import estimate
from diffmegatron.evaluation.suite import Estimate, Mean, Records, Suite

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    # Importing matplotlib takes half a second, so only the functions that draw import it.
    Axes = Figure = Any


def estimate_measures(suite: Suite, records: Records) -> dict[str, Estimate]:
    """Return the estimate of each measure, by the name of the measure.

    Leave out a measure if the weights of all its records are 0. The bootstrap draws single records,
    so the interval of a measure is too narrow if its records are not independent.
    """
    shares: dict[str, dict[str, Mean]] = {}
    for number, record in enumerate(records):
        for measure, share in suite.means(record).items():
            shares.setdefault(measure, {})[str(number)] = share
    found = {measure: estimate(of_measure) for measure, of_measure in shares.items()}
    return {measure: each for measure, each in found.items() if each is not None}


def plot_bars(
    axes: Axes,
    labels: Sequence[str],
    targets: Mapping[str, Sequence[Estimate | None]],
    ylabel: str,
) -> None:
    """Plot a group of bars for each label: one bar with a 95% interval per target.

    ``targets`` maps the name of a target to its estimates, one per label; None: no bar.
    """
    width = 0.8 / len(targets)
    for number, (target, estimates) in enumerate(targets.items()):
        places = [place for place, each in enumerate(estimates) if each is not None]
        known = [each for each in estimates if each is not None]
        axes.bar(
            [place + (number + 0.5) * width - 0.4 for place in places],
            [each.value for each in known],
            width,
            yerr=_errors(known),
            capsize=2,
            label=target,
        )
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylabel(ylabel)
    place_legend(axes)


def plot_measures(
    axes: Axes,
    suite: Suite,
    records: Mapping[str, Records],
    measures: Mapping[str, str],
    ylabel: str,
    *,
    is_share: bool = False,
) -> None:
    """Plot bars of several measures of a suite for each target.

    ``records`` maps the name of a target to its records. ``measures`` maps the label of a group of
    bars to the name of its measure. With ``is_share``, the y axis ends at 1.
    """
    estimates = {name: estimate_measures(suite, each) for name, each in records.items()}
    bars = {
        target: [own.get(measure) for measure in measures.values()]
        for target, own in estimates.items()
    }
    plot_bars(axes, list(measures), bars, ylabel)
    if is_share:
        axes.set_ylim(0, 1)


def plot_curves(
    axes: Axes, targets: Mapping[str, Sequence[tuple[float, Estimate]]], xlabel: str, ylabel: str
) -> None:
    """Plot a curve with 95% intervals for each target; its points (x, estimate) are sorted by x."""
    for target, points in targets.items():
        if points:
            xs, estimates = zip(*points, strict=True)
            values = [each.value for each in estimates]
            axes.errorbar(xs, values, yerr=_errors(estimates), fmt="o-", capsize=2, label=target)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    place_legend(axes)


def plot_maps(
    figure: Figure,
    grid: np.ndarray,
    tables: Mapping[str, np.ndarray],
    *,
    xlabel: str,
    ylabel: str,
    quantity: str,
    is_logarithmic: bool = False,
) -> None:
    """Plot tables as colour maps with a common scale; rows and columns are numbered from 1.

    Args:
        grid: 1-dim array of matplotlib ``Axes``, one per table.
        tables: title of each map -> nonnegative values [rows, columns].
        quantity: label of the colour bar.
    """
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    values = np.concatenate([table[np.isfinite(table)] for table in tables.values()])
    positive = values[values > 0]
    norm = Normalize(0, values.max() or 1)
    if is_logarithmic and positive.size:
        norm = LogNorm(positive.min(), positive.max())
    for axes, (title, table) in zip(grid, tables.items(), strict=True):
        rows, columns = table.shape
        extent = (0.5, columns + 0.5, rows + 0.5, 0.5)
        image = axes.imshow(table, aspect="auto", extent=extent, norm=norm)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
    figure.colorbar(image, ax=grid, label=quantity)


def place_legend(axes: Axes, columns: int = 3) -> None:
    """Put the legend below the axes, where it covers no curve and no title."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.18),
            ncols=min(columns, len(labels)),
            fontsize="small",
            frameon=False,
        )


def _errors(estimates: Sequence[Estimate]) -> np.ndarray:
    """Return the distances from each value to the lower and upper end of its interval, [2, n].

    Both distances are 0 without an interval.
    """
    ends = [
        (0.0, 0.0)
        if each.low is None or each.high is None
        else (max(0.0, each.value - each.low), max(0.0, each.high - each.value))
        for each in estimates
    ]
    return np.array(ends).reshape(-1, 2).T
