"""``PREFIX.json``: what a prepared corpus is and what it was made of.

It holds no times and no machine, so that the same input and settings give the same bytes.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from diffmegatron.config.base import Section
from diffmegatron.errors import UserError

VERSION = 1
_CHUNK = 1 << 20


class TokenizerRecord(Section):
    """The tokenizer of a corpus; ``sha256`` decides whether another one agrees with it."""

    name: str
    sha256: str
    vocab_size: int
    end_of_document: int


class FileRecord(Section):
    """One file as it was read or written."""

    path: str
    bytes: int
    sha256: str


class LengthBin(Section):
    """Documents of ``at_least`` to twice as many tokens less one, end of document counted."""

    at_least: int
    documents: int
    tokens: int


class Manifest(Section):
    """The whole of ``PREFIX.json``; counts are of documents and of tokens in ``PREFIX.bin``."""

    version: int = VERSION
    tokenizer: TokenizerRecord
    settings: dict[str, str | bool | int | None]
    documents: int
    tokens: int
    text_bytes: int
    rejected: int
    empty: int
    duplicates: int
    lengths: tuple[LengthBin, ...]
    inputs: tuple[FileRecord, ...]
    outputs: tuple[FileRecord, ...]

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
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; 'diffmegatron prepare INPUT --output {prefix}' writes it"
        ) from None
    except (OSError, ValueError) as error:
        detail = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{path} is not the manifest of a prepared corpus: {detail}") from None


def hash_file(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
