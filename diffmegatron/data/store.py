"""Prepared corpora, opened memory-mapped through Megatron's own reader."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from diffmegatron.data.index_file import read_header
from diffmegatron.data.manifest import Manifest, read_manifest
from diffmegatron.data.tokenizers import Tokenizer
from diffmegatron.errors import UserError


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
    def end_of_document(self) -> int:
        """The id that ends every document."""
        return self.manifest.tokenizer.end_of_document


def open_corpus(prefix: str) -> Corpus:
    """Open ``PREFIX.bin``, ``.idx`` and ``.json`` in a time that does not grow with them.

    Raises:
        UserError: a file is missing or truncated, or they do not belong together.
    """
    manifest = read_manifest(prefix)
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    header = read_header(index)
    if not data.is_file():
        raise UserError(f"{data} does not exist; {prefix}.json says that it has tokens")
    size, wanted = data.stat().st_size, manifest.tokens * header.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{data} has {size} bytes, but {prefix}.json says {manifest.tokens} tokens of "
            f"{header.dtype.itemsize} bytes ({wanted}); copy or prepare it again"
        )
    if header.sequences != manifest.documents:
        raise UserError(
            f"index {index} has {header.sequences} documents, but {prefix}.json says "
            f"{manifest.documents}; copy or prepare it again"
        )
    dataset = IndexedDataset(prefix)
    corpus = Corpus(
        prefix,
        manifest,
        dataset.bin_reader.read(header.dtype, count=manifest.tokens, offset=0),
        dataset.index.sequence_lengths,
        dataset.index.sequence_pointers,
        dataset,
    )
    last = int(corpus.offsets[-1]) + int(corpus.lengths[-1]) * header.dtype.itemsize
    if last != size:
        raise UserError(
            f"index {index} ends at byte {last} of {data}, which has {size}; copy or prepare it "
            "again"
        )
    return corpus


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
