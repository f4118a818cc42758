"""``PREFIX.json``: what a prepared corpus is and what it was made of.

It holds no times and no machine, so that the same input and settings give the same bytes. Names
of files stand in it as :func:`printable` gives them.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from diffmegatron.errors import UserError
from diffmegatron.files import open_file, read_json, reason, shown
from diffmegatron.section import Section

_CHUNK = 1 << 20
_READ_BYTES = 1 << 24
_HASHED_AT_ONCE = 1 << 30
LAYOUTS = ("text", "instruction", "chat")

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


class LengthBin(Section):
    """Documents of ``at_least`` to twice as many tokens less one, end of document counted."""

    at_least: Count
    documents: Count
    tokens: Count


class Manifest(Section):
    """The whole of ``PREFIX.json``; counts are of documents and of tokens in ``PREFIX.bin``."""

    version: Literal[1] = 1
    tokenizer: TokenizerRecord
    settings: dict[str, str | bool | int | None]
    documents: Annotated[Count, Field(ge=1)]
    tokens: Annotated[Count, Field(ge=1)]
    text_bytes: Count
    rejected: Count
    empty: Count
    duplicates: Count
    lengths: tuple[LengthBin, ...]
    inputs: tuple[FileRecord, ...]
    outputs: tuple[FileRecord, ...]

    @field_validator("settings")
    @classmethod
    def _has_layout(cls, settings: dict[str, Any]) -> dict[str, Any]:
        if settings.get("layout") not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}")
        return settings

    @property
    def content(self) -> str:
        """Hash of the prepared files: what the caches and the sampling order hang on."""
        joined = ",".join(output.sha256 for output in self.outputs)
        return hashlib.sha256(joined.encode()).hexdigest()


def manifest_path(prefix: str | Path) -> Path:
    """``PREFIX.json``."""
    return Path(f"{prefix}.json")


def read_manifest(prefix: str | Path) -> Manifest:
    """Read ``PREFIX.json``.

    Raises:
        UserError: it is missing, damaged or of another version.
    """
    path = manifest_path(prefix)
    if not os.path.lexists(path):
        raise UserError(
            f"{shown(path)} does not exist; 'diffmegatron prepare INPUT --output "
            f"{shown(Path(prefix))}' writes it"
        )
    manifest: Manifest = read_json(path, Manifest)
    return manifest


def printable(path: str | Path) -> str:
    r"""A file's name as UTF-8 text, which any JSON and any output takes; one text for one name.

    Names are bytes to the system. Those that are UTF-8 stand as they are, every other byte is
    written ``\xff``, and a backslash of the name is doubled so that none is mistaken for one of
    those; undoing the two gives the name back.
    """
    return os.fsencode(path).replace(b"\\", b"\\\\").decode(errors="backslashreplace")


def hash_file(path: Path) -> str:
    """sha256 of an ordinary file, read in pieces.

    Raises:
        UserError: it cannot be read.
    """
    *_, sha256 = hash_in_parts(path)
    return sha256


def hash_in_parts(path: Path) -> Iterator[str]:
    """The same, given after every gibibyte and at the end: sha256 of what has been read so far.

    Raises:
        UserError: it cannot be read.
    """
    digest, read = hashlib.sha256(), 0
    with open_file(path, buffering=0) as stream:
        buffer = memoryview(bytearray(_READ_BYTES))
        while count := _read_into(stream, buffer, path):
            digest.update(buffer[:count])
            read += count
            if read >= _HASHED_AT_ONCE:
                read = 0
                yield digest.hexdigest()
    yield digest.hexdigest()


def _read_into(stream: Any, buffer: memoryview, path: Path) -> int:
    try:
        return int(stream.readinto(buffer))
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
    for start in range(0, len(counts), _CHUNK):
        part = np.asarray(counts[start : start + _CHUNK], dtype=np.int64)
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
