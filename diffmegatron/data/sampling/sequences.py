"""How the documents of a source make sequences: concatenated and cut, or packed.

A block is one sequence. Both kinds answer two questions: how many blocks begin before an epoch
(a pass over the documents), and which pieces of documents a block is made of.
"""

from typing import Literal, NamedTuple, Protocol

import numpy as np

from diffmegatron.data.index.token_store import Corpus
from diffmegatron.data.sampling.array_cache import Cache
from diffmegatron.data.sampling.document_order import DocumentOrder, Selection
from diffmegatron.data.sampling.packing import pack
from diffmegatron.errors import UserError

Packing = Literal["concatenate", "best_fit", "none"]


class Pieces(NamedTuple):
    """Parts of documents, in the order in which they fill a sequence: int ``[n]`` each."""

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Blocks(Protocol):
    """The sequences of one source, forever."""

    def epoch(self, index: int) -> int:
        """The pass over the documents in which block ``index`` begins."""

    def first(self, epoch: int) -> int:
        """The first block of a pass."""

    def whole(self) -> int:
        """Blocks of the first pass that hold no token of the second."""

    def pieces(self, block: int) -> Pieces:
        """What a block is made of: at most s + 1 tokens."""


class Concatenated:
    """Documents end to end, cut every ``seq_length`` tokens.

    The stream repeats forever and block b holds its tokens b s to b s + s, the last one being
    the next block's first, as it is only predicted here. So every token is the input of exactly
    one block per pass, none is dropped at the seam, and later passes are cut elsewhere.
    """

    def __init__(self, corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
        self._corpus, self._order, self._seq_length = corpus, order, seq_length

    def epoch(self, index: int) -> int:
        """See :class:`Blocks`."""
        return index * self._seq_length // self._order.tokens

    def first(self, epoch: int) -> int:
        """See :class:`Blocks`."""
        return -(-epoch * self._order.tokens // self._seq_length)

    def whole(self) -> int:
        """See :class:`Blocks`."""
        return (self._order.tokens - 1) // self._seq_length

    def pieces(self, block: int) -> Pieces:
        """See :class:`Blocks`."""
        order, total = self._order, self._order.tokens
        begin = block * self._seq_length % total
        end = begin + self._seq_length + 1
        # int64 of numpy's: searchsorted would convert the whole array to any other type.
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
        """Places in the order from ``first`` on, through as many passes as there are tokens to."""
        order, total = self._order, self._order.tokens
        passes, rest = divmod(end - 1, total)
        last = int(np.searchsorted(order.ends, np.int64(rest), side="right"))
        size = len(order.documents)
        return np.arange(first, passes * size + last + 1) % size


class Packed:
    """Sequences of :func:`pack`, from the cache: s + 1 tokens at most, filled up when read."""

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

    def epoch(self, index: int) -> int:
        """See :class:`Blocks`."""
        return index // self._size

    def first(self, epoch: int) -> int:
        """See :class:`Blocks`."""
        return epoch * self._size

    def whole(self) -> int:
        """See :class:`Blocks`."""
        return self._size

    def pieces(self, block: int) -> Pieces:
        """See :class:`Blocks`."""
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
    """The sequences of a source.

    Raises:
        UserError: packing is off and no document fills a sequence.
    """
    if packing == "concatenate":
        return Concatenated(corpus, order, seq_length)
    if packing == "none":
        _check_some_document_fills(corpus, order, seq_length)
    return Packed(corpus, order, seq_length, packing, selection, cache)


def _check_some_document_fills(corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
    if order.lengths[-1].at_least > seq_length:  # constant time for corpora of long documents
        return
    longest = int(corpus.lengths[order.documents].max())
    if longest > seq_length:
        return
    raise UserError(
        f"training.seq_length {seq_length} is longer than every document of {corpus.prefix} "
        f"(at most {longest} tokens) and data.packing is 'none', so all of it would be padding; "
        "choose 'best_fit' or a shorter length"
    )
