"""Pictures of runs, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LAMBDA = "attn/lambda_layer_"

Metrics = Mapping[str, Sequence[Mapping[str, float]]]


def plot_runs(path: Path, metrics: Metrics) -> None:
    """Draw the losses of several runs, and lambda of each layer of those that have one.

    Args:
        path: PNG to write.
        metrics: entries of ``metrics.jsonl`` by the name of the run.
    """
    with_lambda = [name for name, entries in metrics.items() if _lambda_names(entries)]
    columns = 1 + len(with_lambda)
    figure = Figure(figsize=(5.5 * columns, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, *lambdas = figure.subplots(1, columns, squeeze=False)[0]
    _plot_losses(losses, metrics)
    for axes, name in zip(lambdas, with_lambda, strict=True):
        _plot_lambdas(axes, name, metrics[name])
    figure.savefig(path, dpi=130)


def _plot_losses(axes: Axes, metrics: Metrics) -> None:
    for name, entries in metrics.items():
        steps, values = _series(entries, "train/loss")
        (line,) = axes.plot(steps, values, label=f"{name}, training")
        steps, values = _series(entries, "valid/loss")
        axes.plot(steps, values, "o--", color=line.get_color(), label=f"{name}, held out")
    axes.set(title="Loss", xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()


def _plot_lambdas(axes: Axes, run: str, entries: Sequence[Mapping[str, float]]) -> None:
    names = _lambda_names(entries)
    for name in names:
        axes.plot(*_series(entries, name), label=f"layer {int(name.removeprefix(_LAMBDA))}")
    axes.set(title=f"{run}: $\\lambda$ per layer", xlabel="step", ylabel="$\\lambda$")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), ncols=1 + len(names) // 16)


def _lambda_names(entries: Sequence[Mapping[str, float]]) -> list[str]:
    return sorted({name for entry in entries for name in entry if name.startswith(_LAMBDA)})


def _series(entries: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    found = [(entry["step"], entry[name]) for entry in entries if name in entry]
    return [step for step, _ in found], [value for _, value in found]
