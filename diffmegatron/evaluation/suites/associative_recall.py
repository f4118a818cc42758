"""Multi-query associative recall (Arora et al., Zoology, 2023): values of keys seen before."""

import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffmegatron.errors import UserError
from diffmegatron.evaluation.bootstrap import estimate
from diffmegatron.evaluation.figures import plot_curves
from diffmegatron.evaluation.requests import Asking, Scoring
from diffmegatron.evaluation.suite import Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import first_texts
from diffmegatron.section import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ACCURACY = "accuracy"


class AssociativeRecall(Suite):
    """Share of values that are the likeliest token after their key's second occurrence.

    A text of 4 D tokens states D pairs of a key and a value, then repeats the same pairs in another
    order. All tokens before a value are given, so D values are asked for at once.
    """

    name: ClassVar[str] = "associative-recall"
    title: ClassVar[str] = "Multi-query associative recall"
    description: ClassVar[str] = (
        "A text states pairs of a key and a value, then repeats the keys in another order; the "
        "score is the share of values that the model predicts after their keys."
    )

    data: tuple[str, ...] = Field(
        min_length=1, description="texts of pairs and the same pairs again, as PATH or NAME=PATH"
    )
    documents: Count = Field(default=512, description="the first of every source")

    @property
    def one_tokenizer(self) -> bool:
        """A key and a value are a token each."""
        return True

    def items(self, target: Target) -> list[Item]:
        """A text.

        Raises:
            UserError: a text does not repeat its pairs, in tokens of the target.
        """
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

    def ask(self, target: Target, item: Item) -> Asking:
        """Return the number of pairs, and of values that are the likeliest token."""
        ids = item.content
        half = len(ids) // 2
        # The first token of the second half is a key, and every second one after it.
        ((scored,),) = yield [Scoring(ids[: half + 1], [ids[half + 1 :]])]
        right = scored.likeliest[::2]
        return {"pairs": len(right), "right": int(right.sum())}

    def means(self, record: Record) -> dict[str, Mean]:
        """Accuracy over all pairs, and over those of texts with as many pairs."""
        share = Mean(record["right"], record["pairs"], per_token=True)
        return {_ACCURACY: share, f"{_ACCURACY}, {record['pairs']} pairs": share}

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "higher"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the accuracy by the number of pairs."""
        points = {}
        for name, of_target in records.items():
            by_pairs: dict[int, dict[str, Mean]] = defaultdict(dict)
            for number, record in enumerate(of_target):
                by_pairs[record["pairs"]][str(number)] = Mean(record["right"], record["pairs"])
            found = {pairs: estimate(shares) for pairs, shares in sorted(by_pairs.items())}
            points[name] = [(pairs, each) for pairs, each in found.items() if each is not None]
        axes = figure.subplots()
        plot_curves(axes, points, "pairs in a text", _ACCURACY)
        axes.set(ylim=(-0.02, 1.02), title=self.title)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        return True
