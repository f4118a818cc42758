"""Statistics of attention heads, as in the figures of DEX (Kong, Jang and Kwak, 2025)."""

from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation import head_statistics as heads
from diffmegatron.evaluation.captured_attention import LayerAttention, watch_attention
from diffmegatron.evaluation.figures import Axes, Figure, place_legend, plot_maps
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Mean, Record, Records
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import TextSuite, first_texts
from diffmegatron.section import Count, Size

DISTANCE, ALIGNMENT = "cosine distance between heads", "CKA between heads"
IMPORTANCE = "importance of a head"


class AttentionAnalysis(TextSuite):
    """Overlap, sparsity, entropy and sign of scores; distance, alignment and importance of heads.

    These are the statistics of Kong, Jang and Kwak (DEX, arXiv 2505.16333), for differential and
    ordinary attention. A text is the start token and the beginning of a document, together at most
    ``length`` tokens.

    - A *score* is an unmasked entry of the map that multiplies the values. In differential
      attention, this is the map after the subtraction. Row n has n scores.
    - The *two maps* of a head are the softmax maps of its signal and its noise, before the
      subtraction. A Transformer, such as the export of DEX, has no measures of two maps.
    - The *top tokens* of a row with n scores are the floor(``top`` x n) tokens with the largest
      entries. Overlaps leave out rows that are too short to have a top token.

    The measures, for a row of n scores of a head unless said otherwise:

    - overlap of top tokens, two maps: share of the top tokens of one map that are also top tokens
      of the other map
    - overlap of top scores, two maps: over the tokens that are top tokens of either map: the sum of
      the smaller of the two entries, divided by the sum of the larger
    - overlap of other scores, two maps: the same over all other tokens
    - overlap of top tokens, two heads of a layer: as for two maps, but for the absolute scores of
      every two heads
    - share of absolute scores below e: number of scores closer to 0 than e, divided by n, for each
      e of ``epsilons``
    - entropy: entropy in nats of the absolute scores divided by their sum; also of the first map
      and of the second map
    - share of negative scores: number of negative scores divided by n
    - negative share of absolute scores: sum of the absolute values of negative scores, divided by
      the sum of all absolute scores
    - cosine distance between heads: 1 - cosine of the scores of two heads, with all rows joined
      into one vector; mean over every two heads of the network
    - CKA between heads: linear CKA of the outputs of two heads before the output projection (after
      a headwise norm), from the unbiased HSIC over the tokens of a text (Nguyen et al. 2021, eq.
      3); mean over every two heads of the network
    - importance of a head: absolute derivative of the text's mean loss with respect to a factor on
      the head's output (Michel et al. 2019)

    Each measure is averaged over rows and heads (or pairs of heads), then over layers, then over
    texts. Pictures show the measures by layer, and the last three also by pair of layers, or by
    layer and head.

    The paper does not define some measures in full. This suite chooses the values of e, absolute
    scores for the top tokens of a head, and the overlap of scores. CKA is computed for each text
    and averaged over texts (Nguyen et al. average HSIC first). The paper's examples of negative
    scores (indirect objects, sarcasm) are not measured.

    The suite needs memory for the queries, keys and head outputs of all layers, and for a backward
    pass of one text. Temporary tensors need a few times 32 MiB, or one row of every head if that is
    more.
    """

    name = "attention-analysis"
    reads_attention = True
    title = "Statistics of attention heads"
    description = (
        "Scores are the attention weights that multiply a head's values, after any subtraction. "
        "The rows are means over queries, heads and layers: sparsity; the entropy of absolute "
        "scores in nats; the share of scores that are negative, and their share of "
        "the sum of absolute scores; the overlap of top tokens, and the distance and CKA "
        "between heads (1: alike); and the slope of the loss in a factor on a head's output "
        "(importance). No value is better or worse by itself."
    )

    documents: Count | None = Field(
        default=16, description="number of documents per source (null: all)"
    )
    length: Size = Field(default=512, description="largest number of tokens of a text")
    top: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.05, description="share of a row's tokens that are its top tokens"
    )
    epsilons: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        default=(0.001, 0.0001), min_length=1, description="thresholds for scores near zero"
    )

    @override
    def items(self, target: Target) -> list[Item]:
        """Return an item for each text with at least ``max(4, 1 / top)`` tokens.

        CKA (the alignment) needs 4 tokens. In a text of fewer than ``1 / top`` tokens, no row has a
        top token.
        """
        # A token has fewer than 16 characters on average, so 16 * `length` characters are enough.
        texts = first_texts(self.data, self.documents, 16 * self.length)
        found = []
        for number, (_, text) in enumerate(texts):
            ids = [target.start_token, *target.encode(text)][: self.length]
            if len(ids) >= max(4, 1 / self.top):
                found.append(Item(str(number), len(ids), ids))
        return found

    @override
    def score(self, model: Model, item: Item) -> Record:
        """Return the measures of a text.

        Distance and alignment have a mean and a table [layers, layers]. Importance has a table
        [layers, heads], and every other measure a list [layers].
        """
        seen: list[LayerAttention] = []
        count = model.target.attention.num_heads
        with (
            torch.no_grad(),
            watch_attention(model, seen.append),
            heads.head_outputs(model, count) as outputs,
        ):
            model.network.base_model(model.batch(item.content), use_cache=False)
        by_layer, distances = heads.map_statistics(seen, self.top, self.epsilons)
        alignments = heads.feature_alignment(outputs)
        seen.clear()
        outputs.clear()
        importance = heads.head_importance(model, item.content, count)
        return {
            "layers": by_layer,
            DISTANCE: _between_layers(distances, count),
            ALIGNMENT: _between_layers(alignments, count),
            IMPORTANCE: importance.tolist(),
        }

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        found = {name: float(np.mean(values)) for name, values in record["layers"].items()}
        for name in (DISTANCE, ALIGNMENT):
            if record[name]["mean"] is not None:
                found[name] = record[name]["mean"]
        found[IMPORTANCE] = float(np.mean(record[IMPORTANCE]))
        return {name: Mean(value, per_token=True) for name, value in found.items()}

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        figure.set_size_inches(13, 8 + 3.8 * len(records))
        ratios = (8, 3.8 * len(records))
        upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=ratios)[:, 0]
        of_layers = {name: _by_layer(of_target) for name, of_target in records.items()}
        for axes, (title, names) in zip(upper.subplots(2, 3).flat, _PANELS.items(), strict=True):
            _draw_lines(axes, title, names, of_layers)
        measures = (DISTANCE, ALIGNMENT, IMPORTANCE)
        for panel, measure in zip(lower.subfigures(1, 3), measures, strict=True):
            plot_maps(
                panel,
                panel.subplots(len(records), 1, squeeze=False)[:, 0],
                {name: _table(of_target, measure) for name, of_target in records.items()},
                xlabel="head" if measure == IMPORTANCE else "layer",
                ylabel="layer",
                quantity=measure,
                is_logarithmic=measure == IMPORTANCE,
            )
        return True


# Title of a panel -> prefixes of the names of its measures.
_PANELS = {
    "overlap of the top tokens": (heads.TOP,),
    "overlap of scores": (heads.IN_TOP, heads.IN_REST),
    "share of scores near zero": (heads.NEAR_ZERO,),
    "entropy": (heads.ENTROPY,),
    "negative scores": (heads.NEGATIVE, heads.NEGATIVE_MASS),
    "heads of a layer": (DISTANCE, ALIGNMENT),
}
# Title of a panel -> label of its y axis, if this is not "share".
_UNITS = {"entropy": "nats", "heads of a layer": "distance or alignment"}
_STYLES = ("-", "--", ":")


def _between_layers(pairs: torch.Tensor, count: int) -> dict[str, Any]:
    """Return the mean over pairs of different heads, and a table of means by pair of layers.

    ``pairs`` has the value of every pair of heads, [layers * count, layers * count], where
    ``count`` is the number of heads per layer. A mean without a pair of different heads is None.
    """
    values = pairs.cpu().numpy()
    different = ~np.eye(len(values), dtype=bool)
    if not np.isfinite(values[different]).all():
        raise NotFiniteError("the output of a head is zero for every token, or not finite")
    blocks = (len(values) // count, count) * 2
    sums = np.where(different, values, 0).reshape(blocks).sum((1, 3))
    counts = different.reshape(blocks).sum((1, 3))
    table = [
        [float(total / n) if n else None for total, n in zip(*row, strict=True)]
        for row in zip(sums, counts, strict=True)
    ]
    return {"mean": float(sums.sum() / counts.sum()) if counts.any() else None, "layers": table}


def _table(records: Records, measure: str) -> np.ndarray:
    """Return the table of a measure, averaged over texts.

    It is [layers, heads] for importance, and [layers, layers] for distance and alignment.
    """
    tables = [
        each[measure] if measure == IMPORTANCE else each[measure]["layers"] for each in records
    ]
    return np.mean(np.array(tables, dtype=np.float64), axis=0)


def _by_layer(records: Records) -> dict[str, np.ndarray]:
    """Return the mean over texts of each measure except importance, [layers].

    Distance and alignment are between different heads of the same layer.
    """
    found = {
        name: np.mean([each["layers"][name] for each in records], axis=0)
        for name in records[0]["layers"]
    }
    return found | {name: np.diagonal(_table(records, name)) for name in (DISTANCE, ALIGNMENT)}


def _draw_lines(
    axes: Axes,
    title: str,
    beginnings: Sequence[str],
    of_layers: Mapping[str, Mapping[str, np.ndarray]],
) -> None:
    """Plot the measures whose names begin with one of ``beginnings``, by layer.

    ``of_layers`` is target name -> measure name -> values [layers].
    """
    from matplotlib.ticker import MaxNLocator

    names = [
        name
        for name in dict.fromkeys(chain.from_iterable(of_layers.values()))
        if name.startswith(tuple(beginnings))
    ]
    lines = [
        (number, style, target, name, by_name[name])
        for number, (target, by_name) in enumerate(of_layers.items())
        for style, name in zip(cycle(_STYLES), names)
        if name in by_name
    ]
    axes.set_title(title)
    if not any(values.any() for *_, values in lines):
        axes.axis("off")
        reason = "all are zero" if lines else "no values"
        axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
        return
    for number, style, target, name, values in lines:
        layers = range(1, 1 + len(values))
        axes.plot(layers, values, style, color=f"C{number}", label=f"{target}: {name}")
    axes.set(xlabel="layer", ylabel=_UNITS.get(title, "share"), ylim=(0, 1.08 * axes.get_ylim()[1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    place_legend(axes, columns=1)
