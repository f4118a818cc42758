"""Sequences built from the documents of a source, by concatenation or by packing.

A sequence of a source is called a block. It has s + 1 tokens, where s is ``seq_length``: s inputs
and the last label. An epoch is one pass over the documents of the source.
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from diffmegatron.data.index.token_store import Corpus
from diffmegatron.data.sampling.array_cache import Cache
from diffmegatron.data.sampling.document_order import DocumentOrder, Selection
from diffmegatron.data.sampling.packing import pack
from diffmegatron.errors import UserError

Packing = Literal["concatenate", "best_fit", "none"]


class Pieces(NamedTuple):
    """The n pieces of documents that fill a sequence, in order; each array is int ``[n]``.

    Attributes:
        documents: index of each piece's document in the corpus.
        starts: index of each piece's first token in its document.
        lengths: number of tokens of each piece.
    """

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Blocks(Protocol):
    """Infinite series of blocks (sequences) of one source over all epochs, numbered from 0."""

    def epoch(self, index: int) -> int:
        """Return the epoch in which block ``index`` begins."""

    def first_block(self, epoch: int) -> int:
        """Return the number of the first block that begins in an epoch."""

    def blocks_in_one_epoch(self) -> int:
        """Return the number of blocks that lie completely within the first epoch."""

    def pieces(self, block: int) -> Pieces:
        """Return the pieces of a block; together they have at most ``seq_length`` + 1 tokens."""


class Concatenated(Blocks):
    """Blocks of concatenated documents, cut every s = ``seq_length`` tokens.

    The concatenated documents are a stream that repeats forever. Block b consists of its tokens b *
    s to b * s + s, both included. The last token is only a label, and also the first token of the
    next block, so every token is an input exactly once per epoch. A block may begin in one epoch
    and end in the next, so epochs are cut at different positions.
    """

    def __init__(self, corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
        self._corpus, self._order, self._seq_length = corpus, order, seq_length

    @override
    def epoch(self, index: int) -> int:
        return index * self._seq_length // self._order.tokens

    @override
    def first_block(self, epoch: int) -> int:
        return -(-epoch * self._order.tokens // self._seq_length)

    @override
    def blocks_in_one_epoch(self) -> int:
        return (self._order.tokens - 1) // self._seq_length

    @override
    def pieces(self, block: int) -> Pieces:
        order, total = self._order, self._order.tokens
        begin = block * self._seq_length % total
        end = begin + self._seq_length + 1
        # For a dtype other than that of order.ends, searchsorted would convert the whole array.
        first = int(np.searchsorted(order.ends, np.int64(begin), side="right"))
        if end <= total:
            last = int(np.searchsorted(order.ends, np.int64(end), side="left"))
            documents = order.documents[first : last + 1]
        else:
            documents = order.documents[self._wrapping_places(first, end)]
        lengths = self._corpus.lengths[documents].astype(np.int64)
        starts = np.zeros_like(lengths)
        starts[0] = begin - (int(order.ends[first - 1]) if first else 0)
        lengths[0] -= starts[0]
        lengths[-1] -= lengths.sum() - (self._seq_length + 1)
        return Pieces(documents, starts, lengths)

    def _wrapping_places(self, first: int, end: int) -> np.ndarray:
        """Return the indices into ``order.documents`` for a block that ends in a later epoch.

        The block begins in the document at index ``first``. ``end`` is the token after the block,
        counted from the start of the epoch in which the block begins.
        """
        order, total = self._order, self._order.tokens
        passes, rest = divmod(end - 1, total)
        last = int(np.searchsorted(order.ends, np.int64(rest), side="right"))
        size = len(order.documents)
        return np.arange(first, passes * size + last + 1) % size


class Packed(Blocks):
    """Blocks built once by :func:`pack` and then read from the cache, the same in every epoch.

    With the packing ``best_fit`` a block may have pieces of several documents; with ``none`` it has
    one piece. A block with fewer than s + 1 tokens is padded when a sample is read.
    """

    def __init__(
        self,
        corpus: Corpus,
        order: DocumentOrder,
        seq_length: int,
        packing: Packing,
        selection: Selection,
        cache: Cache,
    ) -> None:
        self._arrays, _ = cache.open(
            (packing, seq_length, corpus.manifest.content, selection),
            lambda: (
                pack(
                    order.documents,
                    corpus.lengths[order.documents],
                    seq_length + 1,
                    combine=packing == "best_fit",
                ),
                {},
            ),
        )
        self._size = len(self._arrays["ends"])

    @override
    def epoch(self, index: int) -> int:
        return index // self._size

    @override
    def first_block(self, epoch: int) -> int:
        return epoch * self._size

    @override
    def blocks_in_one_epoch(self) -> int:
        return self._size

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
    cache: Cache,
) -> Blocks:
    """Return the blocks of a source."""
    if packing == "concatenate":
        return Concatenated(corpus, order, seq_length)
    if packing == "none" and order.tokens:
        _check_some_document_fills(corpus, order, seq_length)
    return Packed(corpus, order, seq_length, packing, selection, cache)


def _check_some_document_fills(corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
    # Avoid the slow search through all lengths if the last bin of the histogram suffices.
    if order.lengths[-1].at_least > seq_length:
        return
    longest = int(corpus.lengths[order.documents].max())
    if longest > seq_length:
        return
    raise UserError(
        f"training.seq_length {seq_length} is longer than every document of {corpus.prefix} "
        f"(at most {longest} tokens) and data.packing is 'none', so all of it would be padding; "
        "choose 'best_fit' or a shorter length"
    )
