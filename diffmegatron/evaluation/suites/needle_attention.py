"""Attention to the answer and to noise (Differential Transformer, Ye et al., table 3)."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.captured_attention import LayerAttention, watch_attention
from diffmegatron.evaluation.figures import Figure, plot_maps
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Direction, Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.suites.needle import (
    DEPTHS,
    HAYSTACK,
    Share,
    build_prompt,
    open_haystack,
)
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count, Size

_TABLE = "3B, table 3"
_PAPER = {
    "answer": ((0.27, 0.30, 0.31, 0.32, 0.40), (0.03, 0.03, 0.03, 0.07, 0.09)),
    "noise": ((0.01, 0.02, 0.02, 0.02, 0.01), (0.51, 0.54, 0.52, 0.49, 0.49)),
}


class NeedleAttention(Suite):
    """Shares of the last token's attention that fall on the needle and on the rest of the text.

    A share is a sum of absolute values in the last row of a head's attention map, divided by the
    sum of the row. ``answer`` is the needle that the question is about. ``noise`` is the rest of
    the haystack with other needles, without the start token and the question.
    """

    name = "needle-attention"
    reads_attention = True
    title = "Attention to the answer and to noise"
    description = (
        "The share of the last token's attention that falls on a hidden number that is asked "
        "for (answer), and on the rest of the text around it (noise), as a mean over heads and "
        "layers. The first token and the question have the remainder. Depth 0% is the beginning "
        "of the text and 100% its end."
    )
    published = tuple(
        Published(f"{part}, depth {depth:.0%}", differential, transformer, _TABLE)
        for part, values in _PAPER.items()
        for depth, differential, transformer in zip(DEPTHS, *values, strict=True)
    )

    haystack: Path = HAYSTACK
    needles: Size = Field(default=1, description="number of needles; the question is about one")
    length: Size = Field(default=4096, description="tokens of the prompt")
    depths: tuple[Share, ...] = Field(default=DEPTHS, min_length=1)
    samples: Count = Field(default=20, description="items of each depth")

    @override
    def items(self, target: Target) -> list[Item]:
        text = open_haystack(self.haystack, target).digest
        return [
            Item(f"depth {depth:g}/{number}", self.length, (text, depth))
            for depth in self.depths
            for number in range(self.samples)
        ]

    @override
    @torch.no_grad()
    def score(self, model: Model, item: Item) -> Record:
        """Return the depth, and the shares of answer and noise as lists [layers][heads]."""
        _, depth = item.content
        prompt, _ = build_prompt(
            self.haystack, model.target, item.key, self.length, (self.needles, 1), depth
        )
        first, end = prompt.spans[0]
        answer, noise = [], []

        def watch(layer: LayerAttention) -> None:
            row = layer.maps(layer.rows - 1, layer.rows)[:, 0].abs()
            total = row.sum(1)
            if not (total.isfinite() & (total > 0)).all():
                raise NotFiniteError(
                    f"a row of attention of layer {layer.number + 1} is zero or not finite"
                )
            own = row[:, first:end].sum(1)
            answer.append((own / total).tolist())
            noise.append(((row[:, 1 : prompt.haystack_end].sum(1) - own) / total).tolist())

        with watch_attention(model, watch):
            model.network.base_model(model.batch(prompt.ids), use_cache=False)
        return {"depth": depth, "answer": answer, "noise": noise}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        depth = f"depth {record['depth']:.0%}"
        return {
            f"{part}, {depth}": Mean(float(np.mean(record[part]))) for part in ("answer", "noise")
        }

    @override
    def better(self, measure: str) -> Direction:
        return "higher" if measure.startswith("answer") else "lower"

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        figure.set_size_inches(4.5 * len(records), 7.5)
        panels = figure.subfigures(2, 1, squeeze=False)[:, 0]
        for panel, part in zip(panels, ("answer", "noise"), strict=True):
            tables = {
                f"{name}: {part}": np.mean([record[part] for record in of_target], axis=0)
                for name, of_target in records.items()
            }
            plot_maps(
                panel,
                panel.subplots(1, len(records), squeeze=False)[0],
                tables,
                xlabel="head",
                ylabel="layer",
                quantity="share of the last token's attention",
            )
        return True
