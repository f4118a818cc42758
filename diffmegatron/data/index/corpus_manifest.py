"""``PREFIX.json``: what a prepared corpus is and what it was made of.

It holds no times and no machine, so that the same input and settings give the same bytes. Names
of files are written as :func:`printable` gives them.
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
    """The tokenizer of a corpus; ``sha256`` decides whether another one agrees with it."""

    name: str
    sha256: str
    vocab_size: Count
    end_of_document: Count


class FileRecord(Section):
    """One file as it was read or written; ``path`` is :func:`printable`."""

    path: str
    bytes: Count
    sha256: str


class InputRecord(FileRecord):
    """What was read of a file: ``bytes`` of it, after ``before`` and before ``after`` others."""

    before: Count = 0
    after: Count = 0


class PartRecord(Section):
    """Which part of an input it is; ``corpus`` is equal for parts of the same input."""

    number: Annotated[int, Field(ge=1)]
    of: Annotated[int, Field(ge=1)]
    corpus: str


class LengthBin(Section):
    """Documents of ``at_least`` to twice as many tokens less one, end of document counted."""

    at_least: Annotated[Count, Field(ge=1)]
    documents: Count
    tokens: Count


class Manifest(Section):
    """The whole of ``PREFIX.json``; counts are of documents and of tokens in ``PREFIX.bin``.

    Attributes:
        checksum: of all the rest; None in corpora of earlier versions, which have none.
        part: which one it is of a preparation in parts (:mod:`diffmegatron.data.prepare.parts`); a
            part may have no document.
        parts: of a merged corpus (:mod:`diffmegatron.data.prepare.merge_parts`), whose
            ``PREFIX.bin`` is no file but these in ``PREFIX.parts``, one after the other.
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
            raise ValueError("its checksum is another")
        return self

    def _checksum_of_rest(self) -> str:
        rest = self.model_dump_json(exclude={"checksum"}, exclude_defaults=True)
        return hashlib.sha256(rest.encode()).hexdigest()

    def sealed(self) -> Self:
        """Return the manifest with the checksum of what it holds."""
        return self.model_copy(update={"checksum": self._checksum_of_rest()})

    def to_json(self) -> str:
        """Return the text of ``PREFIX.json``."""
        return self.model_dump_json(indent=1) + "\n"

    @property
    def is_fine_tuning(self) -> bool:
        """Whether documents alternate between prompts and responses: instructions, chats."""
        return self.settings["layout"] != "text"

    @property
    def content(self) -> str:
        """Hash of the prepared files: what the caches and the sampling order depend on."""
        joined = ",".join(output.sha256 for output in self.outputs)
        return hashlib.sha256(joined.encode()).hexdigest()


def other_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names and values of those ``before`` that are others ``now``, for a sentence."""
    return [
        f"{name} {clipped(repr(before.get(name)))}" for name in now if before.get(name) != now[name]
    ]


def manifest_path(prefix: str | Path) -> Path:
    """``PREFIX.json``."""
    return Path(f"{prefix}.json")


def parts_folder(prefix: str | Path) -> Path:
    """``PREFIX.parts``, where the parts of a corpus lie that is prepared in parts."""
    return Path(f"{prefix}.parts")


def read_manifest(prefix: str | Path) -> Manifest:
    """Read ``PREFIX.json``.

    Raises:
        UserError: it is missing, damaged or of another version.
    """
    path = manifest_path(prefix)
    if not os.path.lexists(path):
        command = f"prepare INPUT --output {shown(Path(prefix))}"
        if parts_folder(prefix).is_dir():
            command = f"data merge {shown(Path(prefix))}"
        raise UserError(f"{shown(path)} does not exist; 'diffmegatron {command}' writes it")
    manifest: Manifest = read_json(path, Manifest)
    return manifest


def hash_file(path: Path, before: int = 0, after: int = 0) -> str:
    """sha256 of an ordinary file, read in pieces, but for so many bytes at its ends.

    Raises:
        UserError: it cannot be read.
    """
    digest = hashlib.sha256()
    left = file_size(path) - before - after if after else sys.maxsize
    for piece in pieces(path, before):
        digest.update(piece[:left])
        left -= len(piece)
        if left <= 0:
            break
    return digest.hexdigest()


def hash_in_parts(path: Path) -> Iterator[str]:
    """The same, given after every gibibyte and at the end: sha256 of what has been read so far.

    Raises:
        UserError: it cannot be read.
    """
    digest, read = hashlib.sha256(), 0
    for piece in pieces(path):
        digest.update(piece)
        read += len(piece)
        if read >= _HASHED_AT_ONCE:
            read = 0
            yield digest.hexdigest()
    yield digest.hexdigest()


def pieces(path: Path, before: int = 0) -> Iterator[memoryview]:
    """The bytes of an ordinary file after the first ``before``; each piece until the next is asked.

    Raises:
        UserError: it cannot be read.
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
    """Documents and tokens per power of two of the length, in constant memory.

    Args:
        lengths: int32 ``[sequences]``, tokens of each.
        counts: int32 ``[documents]``, sequences of each.
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
    """Documents and tokens per power of two of a document's length."""

    def __init__(self) -> None:
        self._documents, self._tokens = np.zeros(64, np.int64), np.zeros(64, np.int64)

    def add(self, lengths: np.ndarray) -> None:
        """Count documents of these lengths, each at least 1."""
        exponents = np.frexp(lengths.astype(np.float64))[1] - 1
        self._documents += np.bincount(exponents, minlength=64)
        self._tokens += np.bincount(exponents, weights=lengths, minlength=64).astype(np.int64)

    def bins(self) -> tuple[LengthBin, ...]:
        """From the first bin that is not empty to the last."""
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
