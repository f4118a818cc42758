"""Sequences built from the documents of a source, by concatenation or by packing.

A sequence of a source is called a block. It has s + 1 tokens, where s is ``seq_length``: s inputs
and the last label. A packed block may have fewer tokens, and is padded when it is read. An epoch is
one pass over the documents of the source.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from typing_extensions import override

from diffmegatron.data.index.token_store import Corpus
from diffmegatron.data.sampling.array_cache import Arrays, cached_arrays
from diffmegatron.data.sampling.document_order import DocumentOrder, Selection
from diffmegatron.data.sampling.packing import pack

Packing = Literal["concatenate", "best_fit", "none"]


class Pieces(NamedTuple):
    """The n pieces of documents that fill a sequence, in order; each array is int ``[n]``."""

    documents: np.ndarray  # index of the document in the corpus
    starts: np.ndarray  # index of the piece's first token in its document
    lengths: np.ndarray  # number of tokens of the piece


class Blocks(ABC):
    """Blocks (sequences) of one source, numbered from 0 through all epochs without an end.

    Args:
        size: length of an epoch, in tokens for :class:`Concatenated` and in blocks for
            :class:`Packed`.
        step: distance between the starts of two consecutive blocks, in the same unit.
        blocks_in_one_epoch: number of blocks that lie completely within the first epoch.
    """

    def __init__(self, size: int, step: int, blocks_in_one_epoch: int) -> None:
        self._size, self._step = size, step
        self.blocks_in_one_epoch = blocks_in_one_epoch

    def epoch(self, block: int) -> int:
        """Return the epoch in which a block begins."""
        return block * self._step // self._size

    def first_block(self, epoch: int) -> int:
        """Return the number of the first block that begins in an epoch."""
        return -(-epoch * self._size // self._step)

    @abstractmethod
    def pieces(self, block: int) -> Pieces:
        """Return the pieces of a block; together they have at most ``seq_length`` + 1 tokens."""


class Concatenated(Blocks):
    """Blocks of concatenated documents, cut every s = ``seq_length`` tokens.

    The concatenated documents are a stream that repeats forever. Block b has the s + 1 tokens of
    the stream from token b * s on. The last label of a block is the first input of the next block.
    A block may begin in one epoch and end in a later one.
    """

    def __init__(self, corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
        super().__init__(order.tokens, seq_length, (order.tokens - 1) // seq_length)
        self._corpus, self._order = corpus, order

    @override
    def pieces(self, block: int) -> Pieces:
        order, total, length = self._order, self._size, self._step + 1
        begin = block * self._step % total
        end = begin + length
        # If begin had another dtype than order.ends, searchsorted would convert the whole array.
        first = int(np.searchsorted(order.ends, np.int64(begin), side="right"))
        if end <= total:
            last = int(np.searchsorted(order.ends, np.int64(end), side="left"))
            documents = order.documents[first : last + 1]
        else:
            # The block ends in a later epoch.
            passes, rest = divmod(end - 1, total)
            last = int(np.searchsorted(order.ends, np.int64(rest), side="right"))
            count = len(order.documents)
            documents = order.documents[np.arange(first, passes * count + last + 1) % count]
        lengths = self._corpus.lengths[documents].astype(np.int64)
        starts = np.zeros_like(lengths)
        starts[0] = begin - (int(order.ends[first - 1]) if first else 0)
        lengths[0] -= starts[0]
        lengths[-1] -= lengths.sum() - length
        return Pieces(documents, starts, lengths)


class Packed(Blocks):
    """Blocks from the arrays of :func:`pack`, the same in every epoch."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__(len(arrays["ends"]), 1, len(arrays["ends"]))
        self._arrays = arrays

    @override
    def pieces(self, block: int) -> Pieces:
        arrays, number = self._arrays, block % self._size
        first = int(arrays["ends"][number - 1]) if number else 0
        chosen = slice(first, int(arrays["ends"][number]))
        return Pieces(
            arrays["documents"][chosen], arrays["starts"][chosen], arrays["lengths"][chosen]
        )


def open_blocks(
    corpus: Corpus,
    order: DocumentOrder,
    seq_length: int,
    packing: Packing,
    selection: Selection,
    cache: Path,
) -> Blocks:
    """Return the blocks of a source."""
    if packing == "concatenate":
        return Concatenated(corpus, order, seq_length)

    def build() -> Arrays:
        lengths = corpus.lengths[order.documents]
        return pack(order.documents, lengths, seq_length + 1, combine=packing == "best_fit"), {}

    key = (packing, seq_length, corpus.manifest.content, selection)
    return Packed(cached_arrays(cache, key, build)[0])
