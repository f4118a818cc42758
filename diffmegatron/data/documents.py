"""Which documents of a corpus a split uses, and in which order: built once, opened by all.

A document order is two arrays, the documents in their shuffled order and where each one ends in
the stream that they form. They are files beside the corpus (or in ``data.cache_dir``), named by a
hash of everything that they depend on, so that a rank opens them in constant time.
"""

import fcntl
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from diffmegatron.data.permutation import derive_key, uniform
from diffmegatron.data.store import Corpus
from diffmegatron.errors import UserError

Split = Literal["train", "validation", "test"]
_VERSION = 1


@dataclass(frozen=True)
class Selection:
    """Everything that a document order depends on, besides the corpus.

    Attributes:
        split: which share of the documents.
        validation_fraction: share of the documents held out for validation.
        test_fraction: share of the documents held out for testing.
        split_seed: decides which documents are held out.
        seed: decides the order.
    """

    split: Split
    validation_fraction: float
    test_fraction: float
    split_seed: int
    seed: int


@dataclass(frozen=True)
class DocumentOrder:
    """The documents of a split as one stream.

    Attributes:
        documents: int64 ``[n]``, document numbers in the order of the stream.
        ends: int64 ``[n]``, tokens of the stream up to the end of each document.
    """

    documents: np.ndarray
    ends: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of the stream."""
        return int(self.ends[-1]) if len(self.ends) else 0


def open_order(corpus: Corpus, selection: Selection, cache_dir: str | None) -> DocumentOrder:
    """The document order of a split, from the cache, which is filled first where it is empty.

    Raises:
        UserError: the index points outside its file, or the cache cannot be written.
    """
    name = f"{derive_key(_VERSION, corpus.manifest.content, repr(selection)):016x}"
    parent = Path(cache_dir) if cache_dir else Path(f"{corpus.prefix}.cache")
    folder = parent / name
    if not folder.is_dir():
        try:
            _build_once(parent, name, corpus, selection)
        except OSError as error:
            raise UserError(
                f"cannot write the index cache {parent}: {error.strerror}; set data.cache_dir to a "
                "folder that all ranks can write"
            ) from None
    return DocumentOrder(
        np.asarray(np.load(folder / "documents.npy", mmap_mode="r")),
        np.asarray(np.load(folder / "ends.npy", mmap_mode="r")),
    )


def _build_once(parent: Path, name: str, corpus: Corpus, selection: Selection) -> None:
    """Fill the cache under a lock; a rename makes it appear whole.

    Where a network file system does not honour the lock between machines, two of them build the
    same bytes and one rename wins.
    """
    parent.mkdir(parents=True, exist_ok=True)
    with (parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (parent / name).is_dir():
            return
        temporary = parent / f"{name}.{os.uname().nodename}.{os.getpid()}.tmp"
        temporary.mkdir(exist_ok=True)
        order = build_order(corpus, selection)
        np.save(temporary / "documents.npy", order.documents)
        np.save(temporary / "ends.npy", order.ends)
        try:
            temporary.rename(parent / name)
        except OSError:
            shutil.rmtree(temporary)
            if not (parent / name).is_dir():
                raise


def build_order(corpus: Corpus, selection: Selection) -> DocumentOrder:
    """Select and shuffle the documents of a split (see :func:`open_order`)."""
    _check_lengths(corpus)
    documents = select_split(corpus.num_documents, selection)
    shuffle = np.random.default_rng(derive_key("order", corpus.manifest.content, selection.seed))
    shuffle.shuffle(documents)
    return DocumentOrder(documents, np.cumsum(corpus.lengths[documents], dtype=np.int64))


def select_split(num_documents: int, selection: Selection) -> np.ndarray:
    """Documents of a split, ascending int64: disjoint, together all, held-out ones never none.

    A corpus of a single document has no held-out split; one of two has no test split beside
    validation.
    """
    chance = uniform(derive_key("split", selection.split_seed), 0, num_documents)
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
    """Mask of the share ``fraction`` of all with the lowest chance among the free ones."""
    number = min(max(1, round(fraction * len(chance))), int(free.sum()) - 1) if fraction else 0
    if number <= 0:
        return np.zeros_like(free)
    candidates = chance[free]
    return free & (chance <= np.partition(candidates, number - 1)[number - 1])


def _check_lengths(corpus: Corpus) -> None:
    """The whole index, once: at opening only its end is looked at."""
    ends = np.cumsum(corpus.lengths, dtype=np.int64) * corpus.tokens.itemsize
    wrong = np.flatnonzero((corpus.offsets[1:] != ends[:-1]) | (corpus.lengths[1:] <= 0))
    if len(wrong) or corpus.offsets[0] != 0 or corpus.lengths[0] <= 0:
        document = int(wrong[0]) + 1 if len(wrong) else 0
        raise UserError(
            f"index {corpus.prefix}.idx is damaged at document {document}: it lies at byte "
            f"{corpus.offsets[document]} with {corpus.lengths[document]} tokens; copy or prepare "
            "it again"
        )
