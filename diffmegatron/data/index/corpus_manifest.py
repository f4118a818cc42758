"""``PREFIX.json``: the manifest of a prepared corpus, with its origin.

It contains no times and no machine names, so that the same input and settings give the same bytes.
Names of files are :func:`printable` text.
"""

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from diffmegatron.errors import UserError
from diffmegatron.files import clipped, file_size, open_file, read_json, reason, shown
from diffmegatron.section import Section

_BUFFER = 1 << 20
_READ_BYTES = 1 << 24
_HASHED_AT_ONCE = 1 << 30
LAYOUTS = ("text", "instruction", "chat", "template")

Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class TokenizerRecord(Section):
    """The tokenizer of a corpus; tokenizers with equal ``sha256`` are interchangeable."""

    name: str
    sha256: str
    vocab_size: Count
    end_of_document: Count


class FileRecord(Section):
    """A file that was read or written; ``path`` is :func:`printable` text."""

    path: str
    bytes: Count
    sha256: str


class InputRecord(FileRecord):
    """A range of an input file.

    Attributes:
        before: number of bytes of the file before the range.
        after: number of bytes of the file after the range.
    """

    before: Count = 0
    after: Count = 0


class PartRecord(Section):
    """Part ``number`` of ``of`` parts; ``corpus`` is the same for all parts of one input."""

    number: Annotated[int, Field(ge=1)]
    of: Annotated[int, Field(ge=1)]
    corpus: str


class LengthBin(Section):
    """Documents of ``at_least`` to 2 ``at_least`` - 1 tokens, including the end of document."""

    at_least: Annotated[Count, Field(ge=1)]
    documents: Count
    tokens: Count


class Manifest(Section):
    """The content of ``PREFIX.json``; counts refer to the documents and tokens of ``PREFIX.bin``.

    Attributes:
        checksum: hash of all other fields; None in corpora of earlier versions.
        part: record of this part, if the corpus is prepared in parts
            (:mod:`diffmegatron.data.prepare.parts`); a part may have no document.
        parts: token files of a merged corpus (:mod:`diffmegatron.data.prepare.merge_parts`) in
            ``PREFIX.parts``, which take the place of ``PREFIX.bin``.
    """

    version: Literal[1] = 1
    tokenizer: TokenizerRecord
    settings: dict[str, str | bool | int | None]
    documents: Count
    tokens: Count
    text_bytes: Count
    rejected: Count
    empty: Count
    duplicates: Count
    lengths: tuple[LengthBin, ...]
    inputs: tuple[InputRecord, ...]
    outputs: tuple[FileRecord, ...]
    part: PartRecord | None = None
    parts: tuple[FileRecord, ...] = ()
    checksum: str | None = None

    @field_validator("settings")
    @classmethod
    def _has_layout(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if settings.get("layout") not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}")
        return settings

    @model_validator(mode="after")
    def _has_documents(self) -> Self:
        if self.part is None and not (self.documents and self.tokens):
            raise ValueError("there must be a document and a token")
        return self

    @model_validator(mode="after")
    def _is_unchanged(self) -> Self:
        if self.checksum not in (None, self._checksum_of_rest()):
            raise ValueError("its checksum differs")
        return self

    def _checksum_of_rest(self) -> str:
        rest = self.model_dump_json(exclude={"checksum"}, exclude_defaults=True)
        return hashlib.sha256(rest.encode()).hexdigest()

    def sealed(self) -> Self:
        """Return the manifest with its checksum."""
        return self.model_copy(update={"checksum": self._checksum_of_rest()})

    def to_json(self) -> str:
        """Return the text of ``PREFIX.json``."""
        return self.model_dump_json(indent=1) + "\n"

    @property
    def is_fine_tuning(self) -> bool:
        """True if documents alternate between prompts and responses."""
        return self.settings["layout"] != "text"

    @property
    def content(self) -> str:
        """Hash of the prepared files, on which caches and the sampling order depend."""
        joined = ",".join(output.sha256 for output in self.outputs)
        return hashlib.sha256(joined.encode()).hexdigest()


def other_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return names and values of the settings in ``before`` that differ in ``now``."""
    return [
        f"{name} {clipped(repr(before.get(name)))}" for name in now if before.get(name) != now[name]
    ]


def manifest_path(prefix: str | Path) -> Path:
    """Return ``PREFIX.json``."""
    return Path(f"{prefix}.json")


def parts_folder(prefix: str | Path) -> Path:
    """Return ``PREFIX.parts``, the folder of a corpus that is prepared in parts."""
    return Path(f"{prefix}.parts")


def read_manifest(prefix: str | Path) -> Manifest:
    """Read ``PREFIX.json``.

    Raises:
        UserError: the file is missing, damaged or has another version.
    """
    path = manifest_path(prefix)
    if not os.path.lexists(path):
        command = f"prepare INPUT --output {shown(Path(prefix))}"
        if parts_folder(prefix).is_dir():
            command = f"data merge {shown(Path(prefix))}"
        raise UserError(f"{shown(path)} does not exist; write it with 'diffmegatron {command}'")
    manifest: Manifest = read_json(path, Manifest)
    return manifest


def hash_file(path: Path, before: int = 0, after: int = 0) -> str:
    """Return the sha256 of a file, without ``before`` and ``after`` bytes at its ends."""
    digest = hashlib.sha256()
    left = file_size(path) - before - after if after else sys.maxsize
    for piece in pieces(path, before):
        digest.update(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return digest.hexdigest()


def hash_in_parts(path: Path) -> Iterator[str]:
    """Yield the sha256 of the bytes read so far, after every GiB and at the end of the file."""
    digest, read = hashlib.sha256(), 0
    for piece in pieces(path):
        digest.update(piece)
        read += len(piece)
        if read >= _HASHED_AT_ONCE:
            read = 0
            yield digest.hexdigest()
    yield digest.hexdigest()


def pieces(path: Path, before: int = 0) -> Iterator[memoryview]:
    """Yield the bytes of a file after the first ``before``; a piece is valid until the next one.

    Raises:
        UserError: the file cannot be read.
    """
    with open_file(path, buffering=0) as stream:
        stream.seek(before)
        buffer = memoryview(bytearray(_READ_BYTES))
        try:
            while count := stream.readinto(buffer):  # type: ignore[attr-defined]
                yield buffer[:count]
        except OSError as error:
            raise UserError(f"cannot read {shown(path)}: {reason(error)}") from None


def length_histogram(lengths: np.ndarray, counts: np.ndarray) -> tuple[LengthBin, ...]:
    """Count documents and tokens per power of two of the document length, in constant memory.

    Args:
        lengths: int32 ``[sequences]``, tokens of each sequence.
        counts: int32 ``[documents]``, sequences of each document.
    """
    histogram = Histogram()
    sequence = 0
    for start in range(0, len(counts), _BUFFER):
        part = np.asarray(counts[start : start + _BUFFER], dtype=np.int64)
        end = sequence + int(part.sum())
        starts = np.cumsum(part) - part
        histogram.add(np.add.reduceat(lengths[sequence:end], starts, dtype=np.int64))
        sequence = end
    return histogram.bins()


class Histogram:
    """Numbers of documents and tokens per power of two of the document length."""

    def __init__(self) -> None:
        self._documents, self._tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        """Add documents of these lengths, each at least 1."""
        exponents = np.frexp(lengths.astype(np.float64))[1] - 1
        self._documents += np.bincount(exponents, minlength=64)
        self._tokens += np.bincount(exponents, weights=lengths, minlength=64).astype(np.int64)

    def bins(self) -> tuple[LengthBin, ...]:
        """Return the bins from the first to the last that is not empty."""
        used = np.flatnonzero(self._documents)
        if not len(used):
            return ()
        return tuple(
            LengthBin(
                at_least=1 << exponent,
                documents=int(self._documents[exponent]),
                tokens=int(self._tokens[exponent]),
            )
            for exponent in range(int(used[0]), int(used[-1]) + 1)
        )
