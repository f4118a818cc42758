"""Multi-query associative recall: predict the values of repeated keys (Arora et al., 2023)."""

import sys
from collections.abc import Mapping

from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.requests import ItemGenerator, Scoring
from diffmegatron.evaluation.suite import Item, Mean, Record, Records
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import TextSuite, first_texts
from diffmegatron.section import Count

_ACCURACY = "accuracy"
_BY_PAIRS = _ACCURACY + ", {} pairs"


class AssociativeRecall(TextSuite):
    """Share of values that are the most likely token after the second occurrence of their keys.

    A text has 4 * D tokens: D pairs of a key and a value of one token each, then the same pairs
    again in another order.
    """

    name = "associative-recall"
    direction = "higher"
    title = "Multi-query associative recall"
    description = (
        "A text states pairs of a key and a value, then repeats the keys in another order; the "
        "score is the share of values that the model predicts after their keys."
    )

    data: tuple[str, ...] = Field(
        min_length=1, description="texts of pairs and the same pairs again, as PATH or NAME=PATH"
    )
    documents: Count = Field(default=512, description="number of documents per source")

    @property
    @override
    def needs_one_tokenizer(self) -> bool:
        # Keys and values must be single tokens for all targets.
        return True

    @override
    def items(self, target: Target) -> list[Item]:
        found: list[Item] = []
        for source, text in first_texts(self.data, self.documents, sys.maxsize):
            ids = target.encode(text)
            half = len(ids) // 2
            stated = list(zip(ids[:half:2], ids[1:half:2], strict=False))
            asked = list(zip(ids[half::2], ids[half + 1 :: 2], strict=False))
            if len(ids) % 4 or sorted(stated) != sorted(asked) or len(dict(stated)) < len(stated):
                raise UserError(
                    f"text {len(found)} of source {source!r} has {len(ids)} tokens of "
                    f"{target.name} that are not pairs of different keys and the same pairs again; "
                    "give a text of 'python -m tools.benchmarks study_recall' and a model trained "
                    "on it"
                )
            found.append(Item(f"{source}/{len(found)}", len(ids), ids))
        return found

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        ids = item.content
        half = len(ids) // 2
        # The continuation begins after the first repeated key, so its values are at 0, 2, 4, ...
        ((scored,),) = yield [Scoring(ids[: half + 1], [ids[half + 1 :]])]
        right = scored.is_most_likely[::2]
        return {"pairs": len(right), "right": int(right.sum())}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        share = Mean(record["right"], record["pairs"], per_token=True)
        return {_ACCURACY: share, _BY_PAIRS.format(record["pairs"]): share}

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        points = {}
        for name, of_target in records.items():
            estimates = estimate_measures(self, of_target)
            numbers = sorted({record["pairs"] for record in of_target})
            points[name] = [(pairs, estimates[_BY_PAIRS.format(pairs)]) for pairs in numbers]
        axes = figure.subplots()
        plot_curves(axes, points, "pairs in a text", _ACCURACY)
        axes.set(ylim=(-0.02, 1.02), title=self.title)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        return True
