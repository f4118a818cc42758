"""Associative recall: prediction of a token from an earlier occurrence of the same bigram.

The term is from Arora et al. (2023). The suite ``recall`` measures associative recall (AR) on real
text. A token is an AR hit if it is the second token of a bigram that occurs earlier in its window
and is rare in the training corpus (table 6 of Differential Transformer, Ye et al.). The suite
``associative-recall`` measures AR on texts of key-value pairs.
"""

import sys
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.data.index.token_store import Tokens, open_corpus
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.requests import ItemGenerator, Scoring
from diffmegatron.evaluation.suite import Direction, Item, Mean, Published, Record, Records
from diffmegatron.evaluation.targets import Target, encode_alike
from diffmegatron.evaluation.text import TextSuite, WindowSuite, first_texts
from diffmegatron.files import format_path
from diffmegatron.section import Count, SizeOrZero

HITS = "nats per token, AR hits"
OTHERS = "nats per token, other tokens"
_SHARE = "share of AR hits"
_TABLE = "1.4B, table 6"
_ACCURACY = "accuracy"
_BY_PAIRS = _ACCURACY + ", {} pairs"
# Number of tokens of the training corpus in memory at once.
_BUFFER = 1 << 22


class Recall(WindowSuite):
    """Loss of AR hits (associative recall) and of all other tokens, as in Zoology.

    An AR hit is the second token of a bigram that occurred earlier in its window, and that occurs
    at most ``rare`` times in the training corpus. The paper does not give the length of its
    windows.
    """

    name = "recall"
    within_training = True
    needs_one_tokenizer: ClassVar[bool] = True
    title = "Associative recall on held-out text"
    description = (
        "The loss of the second token of a rare pair that stands earlier in its window (AR "
        "hits), which a model can look up there, and the loss of all other tokens. A pair is "
        "rare if it occurs at most as often as the setting rare in the training corpus."
    )
    published = (
        Published(HITS, 0.880, 0.898, _TABLE),
        Published(OTHERS, 3.247, 3.272, _TABLE),
    )

    training: Path = Field(description="the PREFIX of the corpus that the targets were trained on")
    rare: SizeOrZero = Field(
        default=1250,
        description="largest number of occurrences of the bigram in the training corpus",
    )

    @override
    def check(self, target: Target) -> None:
        recorded = open_corpus(str(self.training)).manifest.tokenizer
        if not encode_alike(load_tokenizer(recorded.name), target.tokenizer):
            raise UserError(
                f"recall.training {format_path(self.training)} was prepared with tokenizer "
                f"{recorded.name!r}, and {target.name} has another one; give the corpus that the "
                "model was trained on"
            )

    @override
    def items(self, target: Target) -> list[Item]:
        documents = [self.windows(text, target) for _, text in self.texts()]
        windows = chain.from_iterable(documents)
        bigrams = {pair for window in windows for pair, _ in _repeated(window)}
        # Keep `corpus`: its deletion would close the mapped file that `corpus.tokens` is a view of.
        corpus = open_corpus(str(self.training))
        counts = count_bigrams(corpus.tokens, bigrams)
        rare = {pair for pair, count in counts.items() if count <= self.rare}
        found = []
        for number, document in enumerate(documents):
            content = [
                (window, [place for pair, place in _repeated(window) if pair in rare])
                for window in document
            ]
            found.append(Item(str(number), self.context, content))
        return found

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        answers = yield [Scoring([target.start_token], [window]) for window, _ in item.content]
        record = {"hits": 0, "hit_nats": 0.0, "others": 0, "other_nats": 0.0}
        for (window, places), (scored,) in zip(item.content, answers, strict=True):
            losses = scored.losses.double()
            hits = losses[places].sum().item()
            record["hits"] += len(places)
            record["hit_nats"] += hits
            record["others"] += len(window) - len(places)
            record["other_nats"] += losses.sum().item() - hits
        return record

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        hits, others = record["hits"], record["others"]
        return {
            HITS: Mean(record["hit_nats"], hits, per_token=True),
            OTHERS: Mean(record["other_nats"], others, per_token=True),
            _SHARE: Mean(hits, hits + others, per_token=True),
        }

    @override
    def better(self, measure: str) -> Direction | None:
        return None if measure == _SHARE else "lower"


def count_bigrams(tokens: Tokens, bigrams: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """Return the number of occurrences of each of ``bigrams`` in the sequence ``tokens``."""
    wanted = sorted(bigrams)
    keys = np.array([_key(*pair) for pair in wanted], dtype=np.int64)
    counts = np.zeros(len(keys), dtype=np.int64)
    for first in range(0, len(tokens) - 1 if wanted else 0, _BUFFER):
        part = tokens[first : first + _BUFFER + 1].astype(np.int64)
        found = _key(part[:-1], part[1:])
        places = np.minimum(np.searchsorted(keys, found), len(keys) - 1)
        counts += np.bincount(places[keys[places] == found], minlength=len(keys))
    return dict(zip(wanted, counts.tolist(), strict=True))


def _key(first: Any, second: Any) -> Any:
    """Return a number for a bigram, elementwise for arrays; the numbers sort like the bigrams."""
    return first * (1 << 32) + second


def _repeated(window: list[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (bigram, position of its second token) for each repetition of a bigram in a window."""
    seen: set[tuple[int, int]] = set()
    for place, pair in enumerate(pairwise(window), start=1):
        if pair in seen:
            yield pair, place
        seen.add(pair)


class AssociativeRecall(TextSuite):
    """Multi-query associative recall (Arora et al., Zoology, 2023), for models trained on it.

    A text states D pairs of a key and a value of one token each, then repeats the same pairs in
    another order. The score is the share of repeated keys after which the correct value is the most
    likely token. ``python -m tools.benchmarks study_recall`` writes such texts. *Deviation*:
    Zoology puts other tokens between the queries.
    """

    name = "associative-recall"
    direction = "higher"
    # Keys and values must be single tokens for all targets.
    needs_one_tokenizer: ClassVar[bool] = True
    title = "Multi-query associative recall"
    description = (
        "A text states pairs of a key and a value, then repeats the keys in another order; the "
        "score is the share of values that the model predicts after their keys."
    )

    data: tuple[str, ...] = Field(
        min_length=1, description="texts of pairs and the same pairs again, as PATH or NAME=PATH"
    )
    documents: Count = Field(default=512, description="number of documents per source")

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
