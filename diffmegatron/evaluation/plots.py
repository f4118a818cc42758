"""Pictures of runs, drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_LAMBDA = "attn/lambda_layer_"
_LABELS = {"differential": "Diff Transformer", "softmax": "Transformer"}

Metrics = Mapping[str, Sequence[Mapping[str, float]]]


def plot_pair(path: Path, metrics: Metrics) -> None:
    """Draw the loss of both twins, and lambda of each layer of the differential one.

    Args:
        path: PNG to write.
        metrics: entries of ``metrics.jsonl`` by the twin's ``model.attention``.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    losses, lambdas = figure.subplots(1, 2)
    _plot_losses(losses, metrics)
    _plot_lambdas(lambdas, metrics["differential"])
    figure.savefig(path, dpi=130)


def _plot_losses(axes: Axes, metrics: Metrics) -> None:
    for twin, entries in metrics.items():
        steps, values = _series(entries, "train/loss")
        (line,) = axes.plot(steps, values, label=f"{_LABELS[twin]}, training")
        steps, values = _series(entries, "valid/loss")
        axes.plot(steps, values, "o--", color=line.get_color(), label=f"{_LABELS[twin]}, held out")
    axes.set(title="Loss", xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()


def _plot_lambdas(axes: Axes, entries: Sequence[Mapping[str, float]]) -> None:
    names = sorted({name for entry in entries for name in entry if name.startswith(_LAMBDA)})
    for name in names:
        axes.plot(*_series(entries, name), label=f"layer {int(name.removeprefix(_LAMBDA))}")
    axes.set(title="$\\lambda$ per layer", xlabel="step", ylabel="$\\lambda$")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), ncols=1 + len(names) // 16)


def _series(entries: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    found = [(entry["step"], entry[name]) for entry in entries if name in entry]
    return [step for step, _ in found], [value for _, value in found]
