"""Choice and order of the documents of a split, built once and then read from a cache."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from diffmegatron.data.index.corpus_manifest import LengthBin, length_histogram
from diffmegatron.data.index.token_store import Corpus
from diffmegatron.data.sampling.array_cache import Arrays, cached_arrays
from diffmegatron.data.sampling.length_upsampling import keep_long
from diffmegatron.data.sampling.permutation import derive_key, random_bits, uniform
from diffmegatron.errors import UserError

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Selection:
    """Settings that determine the document order of a corpus."""

    split: Split
    validation_fraction: float  # share of the documents held out for validation, 0 to 1
    test_fraction: float
    split_seed: int  # determines which documents are held out
    seed: int  # determines the order, and which short documents are kept
    long_tokens: int = 0  # minimum tokens of a long document, without end-of-document token
    keep_short: float = 1.0  # probability of keeping a short document


@dataclass(frozen=True)
class DocumentOrder:
    """Token stream of a split: the n documents that length up-sampling keeps, shuffled."""

    documents: np.ndarray  # int64 [n]: index of each document in the corpus
    ends: np.ndarray  # int64 [n]: number of tokens of the stream up to the end of each document
    split_lengths: tuple[LengthBin, ...]  # length histogram of all documents of the split
    lengths: tuple[LengthBin, ...]  # length histogram of the n documents
    selection: Selection

    @cached_property
    def tokens(self) -> int:
        """Number of tokens of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def kept_share(self) -> float:
        """Number of tokens of the stream divided by the number of tokens of the whole split."""
        return self.tokens / max(1, sum(part.tokens for part in self.split_lengths))


def open_order(corpus: Corpus, selection: Selection, cache: Path) -> DocumentOrder:
    """Return the document order of a split from the folder ``cache``; build it if missing."""
    key = ("documents", corpus.manifest.content, selection)
    arrays, summary = cached_arrays(cache, key, lambda: build_order(corpus, selection))
    order = DocumentOrder(
        arrays["documents"],
        arrays["ends"],
        split_lengths=_bins(summary["split_lengths"]),
        lengths=_bins(summary["lengths"]),
        selection=selection,
    )
    if order.split_lengths and not order.tokens:
        raise UserError(
            f"up-sampling keeps no document of source {corpus.prefix}: all are shorter than "
            f"{selection.long_tokens} tokens, and short ones are kept with probability "
            f"{selection.keep_short:g}; lower data.upsampling.long_tokens or raise keep_short"
        )
    return order


def build_order(corpus: Corpus, selection: Selection) -> Arrays:
    """Compute a :class:`DocumentOrder`; return its arrays, and its histograms as JSON values."""
    corpus.check_index()
    documents = select_split(len(corpus.lengths), selection)
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
    # Unlike numpy's random numbers, these hashes are the same in every version of numpy. No two are
    # equal, so every sorting algorithm gives the same order.
    documents = documents[np.argsort(random_bits(derive_key("order", selection.seed), documents))]
    lengths = corpus.lengths[documents]
    summary = {
        name: [part.model_dump() for part in length_histogram([values])]
        for name, values in (("split_lengths", all_lengths), ("lengths", lengths))
    }
    return {"documents": documents, "ends": np.cumsum(lengths, dtype=np.int64)}, summary


def select_split(num_documents: int, selection: Selection) -> np.ndarray:
    """Return the indices of the documents of a split, int64 in ascending order.

    The splits are disjoint and together contain all documents. A held-out split with a positive
    fraction gets at least one document, if another one remains for training. The validation split
    is chosen first, then the test split.
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
    """Select the free documents with the lowest ``chance``, about ``fraction`` of all documents.

    ``chance`` is float64 ``[documents]``. ``free`` and the result are bool ``[documents]``. At
    least one free document remains. With a positive fraction, at least one of two or more free
    documents is selected.
    """
    number = min(max(1, round(fraction * len(chance))), int(free.sum()) - 1) if fraction else 0
    if number <= 0:
        return np.zeros_like(free)
    candidates = chance[free]
    candidates.partition(number - 1)
    return free & (chance <= candidates[number - 1])


def _bins(saved: list[dict[str, Any]]) -> tuple[LengthBin, ...]:
    return tuple(LengthBin.model_validate(part) for part in saved)
