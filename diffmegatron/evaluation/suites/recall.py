"""Associative recall on real text: the loss at repeated bigrams (Arora et al., 2023, Zoology).

A token is an AR hit (associative recall) if it is the second token of a bigram that occurs earlier
in the context and is rare in the training corpus (Differential Transformer, Ye et al., table 6).
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.data.index.token_store import Tokens, open_corpus
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.evaluation.requests import ItemGenerator, Scoring
from diffmegatron.evaluation.suite import Direction, Item, Mean, Published, Record
from diffmegatron.evaluation.targets import Target, encode_alike
from diffmegatron.evaluation.text import WindowSuite
from diffmegatron.files import format_path
from diffmegatron.section import SizeOrZero

HITS = "nats per token, AR hits"
OTHERS = "nats per token, other tokens"
_SHARE = "share of AR hits"
_TABLE = "1.4B, table 6"
# Number of tokens of the training corpus in memory at once.
_BUFFER = 1 << 22


class Recall(WindowSuite):
    """Loss of AR hits and of all other tokens in windows of held-out documents."""

    name = "recall"
    within_training = True
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

    @property
    @override
    def needs_one_tokenizer(self) -> bool:
        return True

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
        pieces = [self.windows(text, target) for _, text in self.texts()]
        repeated = [[list(_repeated(window)) for window in each] for each in pieces]
        bigrams = {pair for each in repeated for window in each for pair, _ in window}
        # `tokens` is a view of a mapped file, which is closed when `corpus` is deleted.
        corpus = open_corpus(str(self.training))
        counts = count_bigrams(corpus.tokens, bigrams)
        rare = {pair for pair, count in counts.items() if count <= self.rare}
        return [
            Item(
                str(number),
                self.context,
                [
                    (window, [place for pair, place in places if pair in rare])
                    for window, places in zip(document, hits, strict=True)
                ],
            )
            for number, (document, hits) in enumerate(zip(pieces, repeated, strict=True))
        ]

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
