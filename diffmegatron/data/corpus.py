"""Readers: from corpus files to raw records, in an order that never changes.

A reader yields bytes; decoding, parsing and tokenising is the workers' part (``encode.py``).
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

import pyarrow
import pyarrow.parquet
import zstandard

from diffmegatron.errors import UserError

Format = Literal["jsonl", "parquet", "text"]
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_READ_ERRORS = (
    OSError,
    EOFError,
    zlib.error,
    zstandard.ZstdError,
    pyarrow.ArrowException,
    UnicodeDecodeError,
)


class Record(NamedTuple):
    """One document as it lies in its file.

    Attributes:
        line: 1-based line, row, or 1 for a file that is one document.
        payload: a JSON line, the document's text, or the columns of a row (strings as bytes).
        problem: why it could not be read, the payload then being empty.
    """

    line: int
    payload: bytes | dict[str, Any]
    problem: str | None = None


@dataclass(frozen=True)
class CorpusFile:
    """One input file, its path as the user would name it, and its size in bytes."""

    path: Path
    format: Format
    size: int


def find_files(inputs: list[Path], pattern: str) -> list[CorpusFile]:
    """The files of a corpus, each folder's in the order of their names.

    Args:
        inputs: files, and folders that are searched recursively.
        pattern: glob of the files that count within a folder, such as ``*.py``.

    Raises:
        UserError: an input does not exist or cannot be read, or there is no file in it.
    """
    files = [file for path in inputs for file in _find(path, pattern)]
    for file in files:
        try:
            file.path.open("rb").close()
        except OSError as error:
            raise UserError(f"cannot read corpus file {file.path}: {error.strerror}") from None
    return files


def _find(path: Path, pattern: str) -> list[CorpusFile]:
    if path.is_file():
        return [_corpus_file(path)]
    if not path.exists():
        raise UserError(f"corpus {path} does not exist; give a file or a folder")
    found = sorted(
        (file for file in path.rglob(pattern) if file.is_file()), key=lambda file: file.as_posix()
    )
    if not found:
        raise UserError(f"corpus folder {path} holds no file that matches {pattern!r}")
    return [_corpus_file(file) for file in found]


def _corpus_file(path: Path) -> CorpusFile:
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    return CorpusFile(path, _SUFFIXES.get(Path(name).suffix, "text"), path.stat().st_size)


def read_records(file: CorpusFile, columns: tuple[str, ...], max_bytes: int) -> Iterator[Record]:
    """Every record of a file in order.

    A file that breaks off (a truncated archive, a disk error) yields what it holds and then one
    failed record; a record above ``max_bytes`` is a failed record; nothing is raised.

    Args:
        columns: those of a Parquet file that are read, as far as it has them.
        max_bytes: the longest payload that is read.
    """
    line = 0
    try:
        for record in _READERS[file.format](file.path, columns, max_bytes):
            line = record.line
            yield record
    except _READ_ERRORS as error:
        yield Record(line + 1, b"", f"file cannot be read further: {error}")


def _read_lines(path: Path, columns: tuple[str, ...], max_bytes: int) -> Iterator[Record]:
    with _open(path) as stream:
        line = 0
        while payload := stream.readline(max_bytes + 2):
            line += 1
            if len(payload.rstrip(b"\r\n")) <= max_bytes:
                yield Record(line, payload)
                continue
            while payload and not payload.endswith(b"\n"):
                payload = stream.readline(1 << 20)
            yield _oversized(line, max_bytes)


def _read_text(path: Path, columns: tuple[str, ...], max_bytes: int) -> Iterator[Record]:
    with _open(path) as stream:
        payload = stream.read(max_bytes + 1)
    yield Record(1, payload) if len(payload) <= max_bytes else _oversized(1, max_bytes)


def _read_parquet(path: Path, columns: tuple[str, ...], max_bytes: int) -> Iterator[Record]:
    with pyarrow.parquet.ParquetFile(path) as table:
        present = [name for name in columns if name in table.schema_arrow.names]
        line = 0
        if not present:
            # Rows without columns would be no rows to Arrow, and the file would go unseen.
            yield from (Record(row + 1, {}) for row in range(table.metadata.num_rows))
            return
        for batch in table.iter_batches(batch_size=256, columns=present):
            for row in _as_bytes(batch).to_pylist():
                line += 1
                size = sum(len(value) for value in row.values() if isinstance(value, bytes))
                yield Record(line, row) if size <= max_bytes else _oversized(line, max_bytes)


def _as_bytes(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """With string columns as binary: bad UTF-8 in one row would fail the whole batch."""
    columns = [
        column.cast(pyarrow.large_binary())
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        else column
        for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


_READERS = {"jsonl": _read_lines, "text": _read_text, "parquet": _read_parquet}


def _oversized(line: int, max_bytes: int) -> Record:
    return Record(line, b"", f"longer than {max_bytes} bytes")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        # Several frames in a row are one file to zstd's own tools, pzstd writes them.
        decompressor = zstandard.ZstdDecompressor()
        raw = decompressor.stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(cast(io.RawIOBase, raw), buffer_size=1 << 20)
    return path.open("rb", buffering=1 << 20)
