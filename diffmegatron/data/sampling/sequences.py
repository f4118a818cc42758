"""Build sequences from the documents of a source, by concatenation or by packing.

A block is one sequence. An epoch is one pass over the documents.
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
    """Parts of documents in the order in which they fill a sequence, int ``[n]`` each."""

    documents: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray


class Blocks(Protocol):
    """The infinite series of sequences of one source."""

    def epoch(self, index: int) -> int:
        """Return the epoch in which block ``index`` begins."""

    def first(self, epoch: int) -> int:
        """Return the first block of an epoch."""

    def whole(self) -> int:
        """Return the number of blocks in the first epoch that hold no token of the second."""

    def pieces(self, block: int) -> Pieces:
        """Return the pieces of a block, at most s + 1 tokens."""


class Concatenated(Blocks):
    """Concatenated documents, cut every ``seq_length`` tokens.

    The stream of tokens repeats forever. Block b holds the tokens b * s to b * s + s of the stream,
    where s is ``seq_length``. The last token of a block is only a label there, so the next block
    begins with the same token. Every token is thus the input of exactly one block per epoch. No
    token is dropped between epochs, and later epochs have other cuts.
    """

    def __init__(self, corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
        self._corpus, self._order, self._seq_length = corpus, order, seq_length

    @override
    def epoch(self, index: int) -> int:
        return index * self._seq_length // self._order.tokens

    @override
    def first(self, epoch: int) -> int:
        return -(-epoch * self._order.tokens // self._seq_length)

    @override
    def whole(self) -> int:
        return (self._order.tokens - 1) // self._seq_length

    @override
    def pieces(self, block: int) -> Pieces:
        order, total = self._order, self._order.tokens
        begin = block * self._seq_length % total
        end = begin + self._seq_length + 1
        # With any other integer type searchsorted would convert the whole array.
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
        """Return the documents that hold a range of tokens, as indices into the document order.

        The range begins in document ``first`` of the order, and may extend over several epochs.
        """
        order, total = self._order, self._order.tokens
        passes, rest = divmod(end - 1, total)
        last = int(np.searchsorted(order.ends, np.int64(rest), side="right"))
        size = len(order.documents)
        return np.arange(first, passes * size + last + 1) % size


class Packed(Blocks):
    """Sequences of :func:`pack` from the cache: at most s + 1 tokens, padded when they are read."""

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
    def first(self, epoch: int) -> int:
        return epoch * self._size

    @override
    def whole(self) -> int:
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
    """Return the sequences of a source.

    Raises:
        UserError: ``packing`` is ``none`` and no document fills a sequence.
    """
    if packing == "concatenate":
        return Concatenated(corpus, order, seq_length)
    if packing == "none":
        _check_some_document_fills(corpus, order, seq_length)
    return Packed(corpus, order, seq_length, packing, selection, cache)


def _check_some_document_fills(corpus: Corpus, order: DocumentOrder, seq_length: int) -> None:
    if order.lengths[-1].at_least > seq_length:  # This avoids a pass over long corpora.
        return
    longest = int(corpus.lengths[order.documents].max())
    if longest > seq_length:
        return
    raise UserError(
        f"training.seq_length {seq_length} is longer than every document of {corpus.prefix} "
        f"(at most {longest} tokens) and data.packing is 'none', so all of it would be padding; "
        "choose 'best_fit' or a shorter length"
    )
