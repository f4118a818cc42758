"""The documents of a split and their order, built once and then read from a cache."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diffmegatron.data.index.corpus_manifest import Histogram, LengthBin
from diffmegatron.data.index.token_store import Corpus
from diffmegatron.data.sampling.array_cache import Arrays, Cache
from diffmegatron.data.sampling.length_upsampling import keep_long
from diffmegatron.data.sampling.permutation import derive_key, random_bits, uniform
from diffmegatron.errors import UserError

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Selection:
    """All values that a document order depends on, in addition to the corpus.

    Attributes:
        split: ``train``, ``validation`` or ``test``.
        validation_fraction: share of the documents held out for validation.
        test_fraction: share of the documents held out for testing.
        split_seed: seed of the choice of held-out documents.
        seed: seed of the order and of the choice of short documents.
        long_tokens: documents of at least this many tokens (without end of document) are kept.
        keep_short: probability of keeping a shorter document; 1 disables up-sampling.
    """

    split: Split
    validation_fraction: float
    test_fraction: float
    split_seed: int
    seed: int
    long_tokens: int = 0
    keep_short: float = 1.0


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of a split as one stream.

    Attributes:
        documents: int64 ``[n]``, document numbers in the order of the stream.
        ends: int64 ``[n]``, tokens of the stream up to the end of each document.
        split_lengths: length histogram of all documents of the split.
        lengths: length histogram of the documents in the stream, after up-sampling.
    """

    documents: np.ndarray
    ends: np.ndarray
    split_lengths: tuple[LengthBin, ...]
    lengths: tuple[LengthBin, ...]

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def kept_share(self) -> float:
        """Tokens of the stream divided by tokens of the whole split."""
        return self.tokens / max(1, sum(part.tokens for part in self.split_lengths))


def corpus_cache(corpus: Corpus, cache_dir: str | None) -> Cache:
    """Return the cache of a corpus: ``cache_dir`` of the recipe, or a folder beside the corpus."""
    return Cache(Path(cache_dir or f"{corpus.prefix}.cache"))


def open_order(corpus: Corpus, selection: Selection, cache: Cache) -> DocumentOrder:
    """Return the document order of a split from the cache; build it on the first call.

    Raises:
        UserError: the index is damaged, or the cache cannot be written.
    """
    arrays, summary = cache.open(
        ("documents", corpus.manifest.content, selection),
        lambda: build_order(corpus, selection),
    )
    return DocumentOrder(
        arrays["documents"],
        arrays["ends"],
        split_lengths=_bins(summary["split_lengths"]),
        lengths=_bins(summary["lengths"]),
    )


def build_order(corpus: Corpus, selection: Selection) -> Arrays:
    """Compute the arrays and histograms of a :class:`DocumentOrder`."""
    corpus.check_index()
    documents = select_split(corpus.num_documents, selection)
    all_lengths = corpus.lengths[documents]
    documents = documents[
        keep_long(
            all_lengths,
            documents,
            long_tokens=selection.long_tokens,
            keep_short=selection.keep_short,
            seed=selection.seed,
        )
    ]
    documents = _shuffle(documents, derive_key("order", selection.seed))
    lengths = corpus.lengths[documents]
    summary = {"split_lengths": _histogram(all_lengths), "lengths": _histogram(lengths)}
    return {"documents": documents, "ends": np.cumsum(lengths, dtype=np.int64)}, summary


def select_split(num_documents: int, selection: Selection) -> np.ndarray:
    """Return the document numbers of a split, ascending int64.

    The splits are disjoint and cover the corpus. A held-out split of a positive fraction has at
    least one document, unless training would be left without one: a corpus of one document has no
    held-out split, one of two documents has no test split beside validation.
    """
    chance = uniform(derive_key("split", selection.split_seed), np.arange(num_documents))
    training = np.ones(num_documents, dtype=bool)
    for split, fraction in (
        ("validation", selection.validation_fraction),
        ("test", selection.test_fraction),
    ):
        held_out = _lowest(chance, training, fraction)
        if selection.split == split:
            return np.flatnonzero(held_out)
        training &= ~held_out
    return np.flatnonzero(training)


def _lowest(chance: np.ndarray, free: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the free documents with the lowest chance, ``fraction`` of all."""
    number = min(max(1, round(fraction * len(chance))), int(free.sum()) - 1) if fraction else 0
    if number <= 0:
        return np.zeros_like(free)
    candidates = chance[free]
    candidates.partition(number - 1)
    return free & (chance <= candidates[number - 1])


def _shuffle(documents: np.ndarray, key: int) -> np.ndarray:
    # The hash gives the same values in every version of numpy, which its generator may not. It is
    # a bijection, so all keys differ and an unstable sort is deterministic.
    return documents[np.argsort(random_bits(key, documents))]


def _histogram(lengths: np.ndarray) -> list[dict[str, Any]]:
    histogram = Histogram()
    histogram.add(lengths)
    return [part.model_dump() for part in histogram.bins()]


def _bins(saved: list[dict[str, Any]]) -> tuple[LengthBin, ...]:
    return tuple(LengthBin.model_validate(part) for part in saved)


def require_documents(order: DocumentOrder, corpus: Corpus, selection: Selection) -> None:
    """Refuse up-sampling that keeps no document of a source."""
    if order.split_lengths and not order.tokens:
        raise UserError(
            f"up-sampling keeps no document of source {corpus.prefix}: all are shorter than "
            f"{selection.long_tokens} tokens, and short ones are kept with probability "
            f"{selection.keep_short:g}; lower data.upsampling.long_tokens or raise keep_short"
        )
