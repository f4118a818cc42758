"""Manifest ``PREFIX.json`` of a prepared corpus, and checks of the corpus files against it.

The manifest contains no times and no machine names, so equal inputs and settings give equal bytes.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.index_file import IndexHeader, read_header
from diffmegatron.errors import UserError
from diffmegatron.files import (
    explain_os_errors,
    file_size,
    format_path,
    open_file,
    printable,
    read_json,
    shorten,
)
from diffmegatron.section import CountOrZero, Section

_BUFFER = 1 << 20
_READ_BYTES = 1 << 24
_HASHED_AT_ONCE = 1 << 30
LAYOUTS = ("text", "instruction", "chat", "template")


class TokenizerRecord(Section):
    """Tokenizer of a corpus. Tokenizers with equal ``sha256`` are interchangeable."""

    name: str
    sha256: str
    vocab_size: CountOrZero  # highest id plus one, including special tokens
    end_of_document: CountOrZero


class FileRecord(Section):
    """Size and sha256 of an input or output file; for outputs, ``path`` is only the file name."""

    path: str
    bytes: CountOrZero
    sha256: str


class InputRecord(FileRecord):
    """Range of an input file that ``prepare`` read; ``bytes`` and ``sha256`` are of the range."""

    before: CountOrZero = 0  # number of bytes before the range
    after: CountOrZero = 0  # number of bytes after the range


class PartRecord(Section):
    """Part K/N of a corpus: ``number`` is K, counted from 1, and ``of`` is N."""

    number: Annotated[int, Field(ge=1)]
    of: Annotated[int, Field(ge=1)]
    corpus: str  # hash of the names and sizes of all input files, equal for all parts


class LengthBin(Section):
    """Bin of a histogram: documents of ``at_least`` to ``2 * at_least - 1`` tokens."""

    at_least: Annotated[CountOrZero, Field(ge=1)]  # power of two
    documents: CountOrZero
    tokens: CountOrZero


class CorpusManifest(Section):
    """Content of ``PREFIX.json``."""

    version: Literal[1] = 1
    tokenizer: TokenizerRecord
    settings: dict[str, str | bool | int | None]
    documents: CountOrZero  # above 0 in a whole corpus
    tokens: CountOrZero  # with end-of-document tokens
    text_bytes: CountOrZero  # UTF-8 bytes of tokenised text, including dropped duplicates
    rejected: CountOrZero
    empty: CountOrZero
    duplicates: CountOrZero
    lengths: tuple[LengthBin, ...]
    inputs: tuple[InputRecord, ...]
    # PREFIX.bin and PREFIX.idx. In a merged corpus, the record of PREFIX.bin describes the
    # concatenated token files of all parts.
    outputs: tuple[FileRecord, ...]
    part: PartRecord | None = None  # None for a whole corpus
    parts: tuple[FileRecord, ...] = ()  # token files in PREFIX.parts; () unless merged
    checksum: str | None = None  # hash of all other fields; None in old manifests

    @field_validator("settings")
    @classmethod
    def _has_layout(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if settings.get("layout") not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}")
        return settings

    @model_validator(mode="after")
    def _is_intact(self) -> Self:
        if self.part is None and not (self.documents and self.tokens):
            raise ValueError("there must be a document and a token")
        if self.checksum not in (None, self._checksum_of_rest()):
            raise ValueError("its checksum differs")
        return self

    def _checksum_of_rest(self) -> str:
        rest = self.model_dump_json(exclude={"checksum"}, exclude_defaults=True)
        return hashlib.sha256(rest.encode()).hexdigest()

    def sealed(self) -> Self:
        """Return a copy of the manifest that contains its checksum."""
        return self.model_copy(update={"checksum": self._checksum_of_rest()})

    def to_json(self) -> str:
        """Return the text of ``PREFIX.json``."""
        return self.model_dump_json(indent=1) + "\n"

    @property
    def is_fine_tuning(self) -> bool:
        """True if documents consist of prompts and responses, for supervised fine-tuning."""
        return self.settings["layout"] != "text"

    @property
    def content(self) -> str:
        """Hash of the prepared files, which identifies the corpus in caches and checkpoints."""
        joined = ",".join(output.sha256 for output in self.outputs)
        return hashlib.sha256(joined.encode()).hexdigest()


def other_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return "NAME OLD_VALUE" for each setting in ``now`` that differs from ``before``."""
    return [
        f"{name} {shorten(repr(before.get(name)))}" for name in now if before.get(name) != now[name]
    ]


def manifest_path(prefix: str | Path) -> Path:
    """Return the path of the manifest, ``PREFIX.json``."""
    return Path(f"{prefix}.json")


def parts_folder(prefix: str | Path) -> Path:
    """Return the folder for a corpus that is prepared in parts, ``PREFIX.parts``."""
    return Path(f"{prefix}.parts")


def read_corpus_manifest(prefix: str | Path) -> CorpusManifest:
    """Read the manifest ``PREFIX.json`` of a corpus."""
    path = manifest_path(prefix)
    if not os.path.lexists(path):
        command = f"prepare INPUT --output {format_path(Path(prefix))}"
        if parts_folder(prefix).is_dir():
            command = f"data merge {format_path(Path(prefix))}"
        raise UserError(
            f"{format_path(path)} does not exist; write it with 'diffmegatron {command}'"
        )
    manifest: CorpusManifest = read_json(path, CorpusManifest)
    return manifest


def packed_conversations(data: DataConfig) -> list[str]:
    """Return the paths of sources with conversations, if a sequence can have several documents."""
    return [
        source.path
        for source in data.sources
        if data.packing != "none" and read_corpus_manifest(source.path).is_fine_tuning
    ]


def with_document_mask(recipe: Recipe, *, allow_missing: bool = True) -> Recipe:
    """Return the recipe; if ``data.reset_attention_mask`` is None, replace it by True or False.

    It is True if a source has conversations and a sequence can contain several documents. With
    ``allow_missing``, sources that are not on this machine are assumed to have no conversations.
    """
    data = recipe.data
    if data.reset_attention_mask is not None:
        return recipe
    try:
        is_reset = bool(packed_conversations(data))
    except UserError:
        if not allow_missing:
            raise
        is_reset = False
    decided = data.model_copy(update={"reset_attention_mask": is_reset})
    return recipe.model_copy(update={"data": decided})


def hash_file(path: Path, before: int = 0, after: int = 0) -> str:
    """Return the sha256 of a file without its first ``before`` and its last ``after`` bytes."""
    digest = hashlib.sha256()
    left = file_size(path) - before - after if after else sys.maxsize
    for piece in pieces(path, before):
        digest.update(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return digest.hexdigest()


def file_record(path: Path, name: str) -> FileRecord:
    """Return the size and sha256 of the file at ``path``, recorded under the name ``name``."""
    return FileRecord(path=printable(name), bytes=path.stat().st_size, sha256=hash_file(path))


def pieces(path: Path, before: int = 0) -> Iterator[memoryview]:
    """Yield the bytes of a file in pieces of up to 16 MiB, without its first ``before`` bytes.

    All pieces share one buffer, so a piece is valid only until the next piece is requested.
    """
    with open_file(path, buffering=0) as stream:
        stream.seek(before)
        buffer = memoryview(bytearray(_READ_BYTES))
        with explain_os_errors(f"cannot read {format_path(path)}"):
            while count := stream.readinto(buffer):  # type: ignore[attr-defined]
                yield buffer[:count]


def data_files(manifest: CorpusManifest) -> tuple[str, ...]:
    """Return the suffixes of the data files of a corpus, ``.idx`` last.

    The token files are ``.bin``, or ``.parts/NAME`` for each part of a merged corpus.
    """
    parts = tuple(f".parts/{part.path}" for part in manifest.parts)
    return (*(parts or (".bin",)), ".idx")


def check_sizes(prefix: str | Path, manifest: CorpusManifest) -> IndexHeader:
    """Compare file sizes and the number of documents with the manifest; return the index header."""
    header = read_header(Path(f"{prefix}.idx"))
    name = format_path(manifest_path(prefix))
    for part in manifest.parts:
        path = parts_folder(prefix) / part.path
        if (size := file_size(path)) != part.bytes:
            raise UserError(
                f"{format_path(path)} has {size} bytes, but {name} has {part.bytes}; copy it "
                "again, or prepare that part again"
            )
    data = Path(f"{prefix}.bin")
    size = sum(part.bytes for part in manifest.parts) or file_size(data)
    wanted = manifest.tokens * header.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{format_path(data)} has {size} bytes, but {name} has {manifest.tokens} tokens of "
            f"{header.dtype.itemsize} bytes ({wanted}); copy or prepare it again"
        )
    if header.documents != manifest.documents:
        raise UserError(
            f"index {format_path(Path(f'{prefix}.idx'))} has {header.documents} documents, but "
            f"{name} has {manifest.documents}; copy or prepare it again"
        )
    return header


def check_hash(prefix: str | Path, suffix: str) -> Iterator[None]:
    """Compare the hash of one data file with the manifest; ``suffix`` is from :func:`data_files`.

    The generator yields after every GiB, so that the caller can do other work. It compares the
    hashes only when it is exhausted.
    """
    path, manifest = Path(f"{prefix}{suffix}"), read_corpus_manifest(prefix)
    # The files may have been renamed to another prefix, so find the recorded hash by suffix.
    recorded = {Path(output.path).suffix: output.sha256 for output in manifest.outputs}
    recorded |= {f".parts/{part.path}": part.sha256 for part in manifest.parts}
    digest, read = hashlib.sha256(), 0
    for piece in pieces(path):
        digest.update(piece)
        read += len(piece)
        if read >= _HASHED_AT_ONCE:
            read = 0
            yield
    yield
    if digest.hexdigest() != recorded.get(suffix):
        raise UserError(
            f"{format_path(path)} is damaged: its sha256 is not that of "
            f"{format_path(manifest_path(prefix))}; copy or prepare it again"
        )


def check_hashes(prefix: str | Path) -> CorpusManifest:
    """Check first the sizes and then the hashes of all data files; return the manifest."""
    manifest = read_corpus_manifest(prefix)
    check_sizes(prefix, manifest)
    for suffix in data_files(manifest):
        list(check_hash(prefix, suffix))
    return manifest


def length_histogram(lengths: Iterable[np.ndarray]) -> tuple[LengthBin, ...]:
    """Return a histogram of document lengths with a bin per power of two.

    The bins range from the first to the last non-empty bin. ``lengths`` yields int arrays
    ``[documents]`` with the number of tokens of each document, at least 1.
    """
    documents, tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)
    for part in lengths:
        exponents = np.frexp(part.astype(np.float64))[1] - 1
        documents += np.bincount(exponents, minlength=64)
        tokens += np.bincount(exponents, weights=part, minlength=64).astype(np.int64)
    used = np.flatnonzero(documents)
    return tuple(
        LengthBin(at_least=1 << n, documents=int(documents[n]), tokens=int(tokens[n]))
        for n in (range(int(used[0]), int(used[-1]) + 1) if len(used) else ())
    )


def document_lengths(lengths: np.ndarray, counts: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the number of tokens of each document, int64, in arrays of limited size.

    ``lengths``, int32 ``[sequences]``, is the number of tokens of each sequence. ``counts``, int32
    ``[documents]``, is the number of sequences of each document.
    """
    sequence = 0
    for start in range(0, len(counts), _BUFFER):
        part = np.asarray(counts[start : start + _BUFFER], dtype=np.int64)
        end = sequence + int(part.sum())
        yield np.add.reduceat(lengths[sequence:end], np.cumsum(part) - part, dtype=np.int64)
        sequence = end
