"""Open prepared corpora; their files are memory-mapped."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexReader

from diffmegatron.data.index.corpus_manifest import (
    CorpusManifest,
    check_sizes,
    parts_folder,
    read_corpus_manifest,
)
from diffmegatron.data.index.index_file import check_boundaries
from diffmegatron.data.tokenizers import Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, open_file, shorten

_BUFFER = 1 << 22
# Each mapping keeps a file open, and the usual limit is 1024 open files per process.
_MAPPED_AT_ONCE = 128


class PartTokens:
    """Concatenation of token files, sliced like one array; ``files`` are paths and sizes in bytes.

    A file is memory-mapped when it is first read. A slice within one file is a view. A slice over
    several files is a copy.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: np.dtype) -> None:
        self.dtype, self.itemsize = dtype, dtype.itemsize
        filled = [(path, size // dtype.itemsize) for path, size in files if size]
        self._starts = list(itertools.accumulate((length for _, length in filled), initial=0))
        # As a decorator of a method, lru_cache would keep this object and its mapped files alive.
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(lambda number: _map(*filled[number], dtype))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, place: slice, /) -> np.ndarray:
        first, end, _ = place.indices(len(self))
        number = bisect_right(self._starts, first) - 1
        found = []
        while first < end:
            start, stop = self._starts[number], min(end, self._starts[number + 1])
            found.append(self._mapped(number)[first - start : stop - start])
            first, number = stop, number + 1
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])


def _map(path: Path, length: int, dtype: np.dtype) -> np.ndarray:
    with open_file(path) as stream:
        try:
            return np.asarray(np.memmap(stream, dtype, "r", shape=(length,)))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map {format_path(path)}: {error}; copy it again") from None


Tokens = np.ndarray | PartTokens


@dataclass(frozen=True)
class Corpus:
    """Prepared corpus, opened for reading.

    The arrays can be views of files that ``index`` and ``dataset`` map. Reading an array after
    ``index`` and ``dataset`` are deleted causes a segmentation fault.
    """

    prefix: str  # path without .bin
    manifest: CorpusManifest
    tokens: Tokens  # int32 or uint16 [tokens]
    lengths: np.ndarray  # int32 [documents]: number of tokens, with end-of-document token
    offsets: np.ndarray  # int64 [documents]: byte at which each document begins in the tokens
    index: _IndexReader
    dataset: IndexedDataset | None  # None for a merged corpus, whose tokens are in several files

    def loss_mask(self, document: int) -> np.ndarray:
        """Return the loss mask of a fine-tuning document, bool ``[tokens]``, True in responses."""
        first, end = self.index.document_indices[document : document + 2]
        segments = self.index.sequence_lengths[first:end]
        _check_segments(self.prefix, segments)
        return np.repeat(np.arange(len(segments)) % 2 == 1, segments)

    def check_index(self) -> None:
        """Check every entry of the index; :func:`open_corpus` checks only some entries."""
        segments = self.index.sequence_lengths
        check_boundaries(f"{self.prefix}.idx", self.index.document_indices)
        expected = 0
        for first in range(0, len(self.lengths), _BUFFER):
            lengths = self.lengths[first : first + _BUFFER].astype(np.int64)
            offsets = self.offsets[first : first + _BUFFER]
            ends = expected + np.cumsum(lengths) * self.tokens.itemsize
            wrong = (lengths <= 0) | (offsets != ends - lengths * self.tokens.itemsize)
            if wrong.any():
                place = int(np.argmax(wrong))
                raise UserError(
                    f"index {_shown(self.prefix)} is damaged at document {first + place}: byte "
                    f"{offsets[place]}, {lengths[place]} tokens; copy or prepare it again"
                )
            expected = int(ends[-1])
        for first in range(0, len(segments), _BUFFER):
            _check_segments(self.prefix, segments[first : first + _BUFFER])


def open_corpus(prefix: str) -> Corpus:
    """Open a prepared corpus; check the sizes of its files."""
    manifest = read_corpus_manifest(prefix)
    header = check_sizes(prefix, manifest)
    if not manifest.documents:
        raise UserError(
            f"corpus {format_path(Path(prefix))} is a part without documents; give the merged "
            "corpus"
        )
    tokens: Tokens
    if manifest.parts:
        dataset, index = None, _IndexReader(f"{prefix}.idx", multimodal=False)
        files = [(parts_folder(prefix) / part.path, part.bytes) for part in manifest.parts]
        tokens = PartTokens(files, header.dtype)
    else:
        dataset = IndexedDataset(prefix)
        index = dataset.index
        tokens = dataset.bin_reader.read(header.dtype, count=manifest.tokens, offset=0)
    last = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    if last != manifest.tokens * index.dtype_size:
        raise UserError(
            f"index {_shown(prefix)} ends at byte {last} of the tokens, and the tokens have "
            f"{manifest.tokens * index.dtype_size}; copy or prepare it again"
        )
    lengths, offsets = index.sequence_lengths, index.sequence_pointers
    if header.sequences != header.documents:
        check_boundaries(f"{prefix}.idx", index.document_indices)
        starts = index.document_indices[:-1]
        lengths, offsets = np.add.reduceat(lengths, starts, dtype=np.int32), offsets[starts]
    return Corpus(prefix, manifest, tokens, lengths, offsets, index, dataset)


def _check_segments(prefix: str, segments: np.ndarray) -> None:
    if len(segments) and int(segments.min()) < 0:
        raise UserError(
            f"index {_shown(prefix)} is damaged: it has a sequence of {int(segments.min())} "
            "tokens; copy or prepare it again"
        )


def _shown(prefix: str) -> str:
    return format_path(Path(f"{prefix}.idx"))


def check_tokenizer(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer is the one with which the corpus was prepared."""
    recorded = corpus.manifest.tokenizer
    if recorded.sha256 != tokenizer.sha256:
        raise UserError(
            f"corpus {corpus.prefix} was prepared with tokenizer {shorten(repr(recorded.name))} "
            f"(sha256 {shorten(recorded.sha256[:12])}), but data.tokenizer is {tokenizer.name!r} "
            f"({tokenizer.sha256[:12]}); prepare it again, or give the tokenizer of the corpus"
        )
    made = recorded.vocab_size, recorded.end_of_document
    if made != (tokenizer.vocab_size, tokenizer.end_of_document):
        raise UserError(
            f"{corpus.prefix}.json is damaged: its tokenizer {tokenizer.name!r} has {made[0]} ids "
            f"and end of document {made[1]}, but the tokenizer has {tokenizer.vocab_size} and "
            f"{tokenizer.end_of_document}; copy or prepare it again"
        )
