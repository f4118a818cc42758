"""Picture of the scores by which DEX selects attention heads, with the selected heads marked."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffmegatron.files import write_picture

_NAMES = {
    "entropy": "attention entropy, nats",
    "gradient": r"importance $|\partial L / \partial \xi_h|$",
}


def draw_scores(
    path: Path, scores: Sequence[Sequence[float]], heads: Sequence[Sequence[int]], method: str
) -> None:
    """Draw a colour map of the scores [layers][heads], with dots on the selected heads."""
    figure = Figure(
        figsize=(2.5 + 0.25 * len(scores[0]), 1.5 + 0.25 * len(scores)), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(scores, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=axes, label=_NAMES[method])
    marked = [(head, layer) for layer, selected in enumerate(heads) for head in selected]
    axes.plot(
        *zip(*marked, strict=True), "o", color="white", markeredgecolor="black", label="selected"
    )
    axes.set(xlabel="head", ylabel="layer", title="Heads that DEX extends (dots)")
    axes.set_yticks(range(len(scores)), [str(layer + 1) for layer in range(len(scores))])
    write_picture(path, figure)
