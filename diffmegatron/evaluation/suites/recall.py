"""Associative recall on real text: the loss where a bigram of the context comes again (Zoology).

Arora et al. 2023, as Ye et al. use it (table 6): the last token of a bigram that stands earlier in
the context and is rare in training is an AR hit; every other token is not.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from diffmegatron.data.index.part_tokens import Tokens
from diffmegatron.data.index.token_store import open_corpus
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.evaluation.requests import Asking, Scoring
from diffmegatron.evaluation.suite import Item, Mean, Published, Record, Suite, Window
from diffmegatron.evaluation.suites.loss import windows
from diffmegatron.evaluation.targets import Target, give_same_ids
from diffmegatron.evaluation.text import CHARACTERS, default_characters, first_texts
from diffmegatron.files import shown
from diffmegatron.section import Count, SizeOrNone

HITS = "nats per token, AR hits"
OTHERS = "nats per token, other tokens"
_SHARE = "share of AR hits"
_TABLE = "1.4B, table 6"
_BUFFER = 1 << 22


class Recall(Suite):
    """Loss of AR hits against that of all other tokens, in windows of held-out documents.

    Bigrams are counted in all of the training corpus, which is read once, 4M tokens at a time.
    """

    name: ClassVar[str] = "recall"
    within_training: ClassVar[bool] = True
    title: ClassVar[str] = "Associative recall on held-out text"
    description: ClassVar[str] = (
        "The loss where a rare pair of tokens comes again in its context (AR hits), which a "
        "model can look up there, and the loss of all other tokens."
    )
    published: ClassVar[tuple[Published, ...]] = (
        Published(HITS, 0.880, 0.898, _TABLE),
        Published(OTHERS, 3.247, 3.272, _TABLE),
    )

    data: tuple[str, ...] = Field(
        min_length=1, description="text that no target was trained on, as PATH or NAME=PATH"
    )
    training: Path = Field(description="the PREFIX of the corpus that the targets were trained on")
    rare: SizeOrNone = Field(default=1250, description="most occurrences of a hit in training")
    documents: Count = Field(default=64, description="the first of every source")
    characters: Count | None = CHARACTERS
    context: Window = Field(default=2048, description="tokens of a window, the start token counted")

    @property
    def one_tokenizer(self) -> bool:
        """Bigrams are of tokens."""
        return True

    def check(self, target: Target) -> None:
        """The training corpus is of the target's tokenizer."""
        recorded = open_corpus(str(self.training)).manifest.tokenizer
        if not give_same_ids(load_tokenizer(recorded.name), target.tokenizer):
            raise UserError(
                f"recall.training {shown(self.training)} was prepared with tokenizer "
                f"{recorded.name!r}, which is not that of {target.name}; give the corpus that it "
                "was trained on"
            )

    def items(self, target: Target) -> list[Item]:
        """A document: its windows, and in each the positions of AR hits."""
        characters = self.characters or default_characters(self.context)
        pieces = [
            list(windows(target.encode(text), self.context - 1))
            for _, text in first_texts(self.data, self.documents, characters)
        ]
        repeated = [[list(_repeated(window)) for window in each] for each in pieces]
        bigrams = {pair for each in repeated for window in each for pair, _ in window}
        rare = self._rare(bigrams)
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

    def ask(self, target: Target, item: Item) -> Asking:
        """Return nats and tokens of hits and of others."""
        answers = yield [Scoring([target.start], [window]) for window, _ in item.content]
        record = {"hits": 0, "hit_nats": 0.0, "others": 0, "other_nats": 0.0}
        for (window, places), (scored,) in zip(item.content, answers, strict=True):
            losses = scored.nats.double()
            hits = losses[places].sum().item()
            record["hits"] += len(places)
            record["hit_nats"] += hits
            record["others"] += len(window) - len(places)
            record["other_nats"] += losses.sum().item() - hits
        return record

    def means(self, record: Record) -> dict[str, Mean]:
        """Of hits, of others, and the share of hits."""
        hits, others = record["hits"], record["others"]
        return {
            HITS: Mean(record["hit_nats"], hits, per_token=True),
            OTHERS: Mean(record["other_nats"], others, per_token=True),
            _SHARE: Mean(hits, hits + others, per_token=True),
        }

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return None if measure == _SHARE else "lower"

    def _rare(self, bigrams: set[tuple[int, int]]) -> set[tuple[int, int]]:
        corpus = open_corpus(str(self.training))
        counts = count_bigrams(corpus.tokens, bigrams)
        return {pair for pair, count in counts.items() if count <= self.rare}


def count_bigrams(tokens: Tokens, bigrams: set[tuple[int, int]]) -> dict[tuple[int, int], int]:
    """How often each of the bigrams stands in ``tokens`` [n], of which pieces are read."""
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
    """One number for a bigram, or for arrays of them, in the order of bigrams."""
    return first * (1 << 32) + second


def _repeated(window: list[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """Bigrams that stand earlier in the window, and the positions of their last tokens."""
    seen: set[tuple[int, int]] = set()
    for place, pair in enumerate(pairwise(window), start=1):
        if pair in seen:
            yield pair, place
        seen.add(pair)
