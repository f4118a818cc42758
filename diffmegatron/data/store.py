"""Prepared corpora, opened memory-mapped through Megatron's own reader."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from diffmegatron.data.index_file import IndexHeader, read_header
from diffmegatron.data.manifest import Manifest, read_manifest
from diffmegatron.data.tokenizers import Tokenizer
from diffmegatron.errors import UserError

_CHUNK = 1 << 22


@dataclass(frozen=True)
class Corpus:
    """One prepared corpus; the arrays are views of the mapped files, nothing is copied.

    Attributes:
        prefix: where it lies.
        manifest: ``PREFIX.json``.
        tokens: int32 or uint16 ``[tokens]``, documents one after the other.
        lengths: int32 ``[documents]``, the end-of-document token counted.
        offsets: int64 ``[documents]``, bytes from the start of ``tokens``.
        dataset: Megatron's reader. It must live as long as the arrays: it closes the mapping when
            it goes, and reading an array after that is a segmentation fault.
    """

    prefix: str
    manifest: Manifest
    tokens: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    dataset: IndexedDataset

    @property
    def num_documents(self) -> int:
        """Documents in the files."""
        return len(self.lengths)

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer uses, from 0 on."""
        return self.manifest.tokenizer.vocab_size

    @property
    def end_of_document(self) -> int:
        """The id that ends every document."""
        return self.manifest.tokenizer.end_of_document

    @property
    def is_fine_tuning(self) -> bool:
        """Whether documents alternate between prompts and responses, and only the latter learn."""
        return self.manifest.settings["layout"] != "text"

    def learnt(self, document: int) -> np.ndarray:
        """Mask of the tokens of a fine-tuning document that are learnt: bool ``[length]``."""
        first, end = self.dataset.document_indices[document : document + 2]
        segments = self.dataset.sequence_lengths[first:end]
        return np.repeat(np.arange(len(segments)) % 2 == 1, segments)

    def check_index(self) -> None:
        """Check every entry of the index, which takes time; opening looks at its end alone.

        Raises:
            UserError: a document lies outside the file, over another, or is empty.
        """
        expected = 0
        for first in range(0, self.num_documents, _CHUNK):
            lengths = self.lengths[first : first + _CHUNK].astype(np.int64)
            offsets = self.offsets[first : first + _CHUNK]
            ends = expected + np.cumsum(lengths) * self.tokens.itemsize
            wrong = (lengths <= 0) | (offsets != ends - lengths * self.tokens.itemsize)
            if wrong.any():
                place = int(np.argmax(wrong))
                raise UserError(
                    f"index {self.prefix}.idx is damaged at document {first + place}: byte "
                    f"{offsets[place]}, {lengths[place]} tokens; copy or prepare it again"
                )
            expected = int(ends[-1])


def open_corpus(prefix: str) -> Corpus:
    """Open ``PREFIX.bin``, ``.idx`` and ``.json`` in a time that does not grow with them.

    (For fine-tuning corpora it grows with the number of documents, a cumulative sum.)

    Raises:
        UserError: a file is missing or truncated, or they do not belong together.
    """
    manifest = read_manifest(prefix)
    header = read_header(Path(f"{prefix}.idx"))
    _check_sizes(prefix, manifest, header)
    dataset = IndexedDataset(prefix)
    index = dataset.index
    last = int(index.sequence_pointers[-1]) + int(index.sequence_lengths[-1]) * index.dtype_size
    if last != manifest.tokens * index.dtype_size:
        raise UserError(
            f"index {prefix}.idx ends at byte {last} of {prefix}.bin, which has "
            f"{manifest.tokens * index.dtype_size}; copy or prepare it again"
        )
    lengths, offsets = index.sequence_lengths, index.sequence_pointers
    if header.sequences != header.documents:
        starts = index.document_indices[:-1]
        lengths, offsets = np.add.reduceat(lengths, starts, dtype=np.int32), offsets[starts]
    tokens = dataset.bin_reader.read(header.dtype, count=manifest.tokens, offset=0)
    return Corpus(prefix, manifest, tokens, lengths, offsets, dataset)


def _check_sizes(prefix: str, manifest: Manifest, header: IndexHeader) -> None:
    """What can go wrong between the three files, before Megatron's reader asserts or maps it."""
    data = Path(f"{prefix}.bin")
    if not data.is_file():
        raise UserError(f"{data} does not exist; {prefix}.json says that it has tokens")
    size, wanted = data.stat().st_size, manifest.tokens * header.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{data} has {size} bytes, but {prefix}.json says {manifest.tokens} tokens of "
            f"{header.dtype.itemsize} bytes ({wanted}); copy or prepare it again"
        )
    if header.documents != manifest.documents:
        raise UserError(
            f"index {prefix}.idx has {header.documents} documents, but {prefix}.json says "
            f"{manifest.documents}; copy or prepare it again"
        )


def check_tokenizer(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the corpus's own.

    Raises:
        UserError: the hashes differ.
    """
    recorded = corpus.manifest.tokenizer
    if recorded.sha256 != tokenizer.sha256:
        raise UserError(
            f"corpus {corpus.prefix} was prepared with tokenizer {recorded.name!r} (sha256 "
            f"{recorded.sha256[:12]}), but data.tokenizer is {tokenizer.name!r} "
            f"({tokenizer.sha256[:12]}); prepare it again or name the tokenizer it was made with"
        )
