"""Prepared corpora, opened memory-mapped through Megatron's own reader."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset, _IndexReader

from diffmegatron.data.index.corpus_manifest import Manifest, parts_folder, read_manifest
from diffmegatron.data.index.index_file import check_boundaries
from diffmegatron.data.index.part_tokens import PartTokens, Tokens
from diffmegatron.data.index.verify_corpus import check_sizes
from diffmegatron.data.tokenizers import Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, shown

_BUFFER = 1 << 22


@dataclass(frozen=True)
class Corpus:
    """One prepared corpus; the arrays are views of the mapped files, nothing is copied.

    Attributes:
        prefix: where it lies.
        manifest: ``PREFIX.json``.
        tokens: int32 or uint16 ``[tokens]``, documents one after the other; of a merged corpus
            in several files.
        lengths: int32 ``[documents]``, the end-of-document token counted.
        offsets: int64 ``[documents]``, bytes from the start of ``tokens``.
        index: Megatron's reader of the index.
        dataset: Megatron's reader of both files; None for a merged corpus. The readers must live as
            long as the arrays: they close the mapping when they go, and reading an array after that
            is a segmentation fault.
    """

    prefix: str
    manifest: Manifest
    tokens: Tokens
    lengths: np.ndarray
    offsets: np.ndarray
    index: _IndexReader
    dataset: IndexedDataset | None

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
        return self.manifest.is_fine_tuning

    def loss_mask(self, document: int) -> np.ndarray:
        """Which tokens of a fine-tuning document count in the loss: bool ``[length]``."""
        first, end = self.index.document_indices[document : document + 2]
        segments = self.index.sequence_lengths[first:end]
        _check_segments(self.prefix, segments)
        return np.repeat(np.arange(len(segments)) % 2 == 1, segments)

    def check_index(self) -> None:
        """Check every entry of the index, which takes time; opening looks at its end alone.

        Raises:
            UserError: a document lies outside the file, over another, or is empty.
        """
        segments = self.index.sequence_lengths
        check_boundaries(f"{self.prefix}.idx", self.index.document_indices)
        expected = 0
        for first in range(0, self.num_documents, _BUFFER):
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
    """Open ``PREFIX.bin``, ``.idx`` and ``.json`` in a time that does not grow with them.

    (For fine-tuning corpora it grows with the number of documents, a cumulative sum.)

    Raises:
        UserError: a file is missing or truncated, or they do not belong together.
    """
    manifest = read_manifest(prefix)
    header = check_sizes(prefix, manifest)
    if not manifest.documents:
        raise UserError(f"corpus {shown(Path(prefix))} is a part without documents; give the whole")
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
            f"index {_shown(prefix)} ends at byte {last} of the tokens, which have "
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
    return shown(Path(f"{prefix}.idx"))


def check_tokenizer(corpus: Corpus, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that is not the corpus's own.

    Raises:
        UserError: the hashes differ.
    """
    recorded = corpus.manifest.tokenizer
    if recorded.sha256 != tokenizer.sha256:
        raise UserError(
            f"corpus {corpus.prefix} was prepared with tokenizer {clipped(repr(recorded.name))} "
            f"(sha256 {clipped(recorded.sha256[:12])}), but data.tokenizer is {tokenizer.name!r} "
            f"({tokenizer.sha256[:12]}); prepare it again or name the tokenizer it was made with"
        )
    made = recorded.vocab_size, recorded.end_of_document
    if made != (tokenizer.vocab_size, tokenizer.end_of_document):
        raise UserError(
            f"{corpus.prefix}.json is damaged: it says that tokenizer {tokenizer.name!r} has "
            f"{made[0]} ids and ends documents with {made[1]}, which are {tokenizer.vocab_size} "
            f"and {tokenizer.end_of_document}; copy or prepare it again"
        )
