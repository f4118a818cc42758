"""Readers: from corpus files to raw records, in an order that never changes.

A reader yields bytes; decoding, parsing and tokenising is the workers' part (``encode.py``).
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, cast

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
_READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError, pyarrow.ArrowException)


class Record(NamedTuple):
    """One document as it lies in its file.

    Attributes:
        line: 1-based line, row, or 1 for a file that is one document.
        payload: a JSON line, or the document's text; what is wrong with it where ``failed``.
        failed: whether the document could not be read at all.
    """

    line: int
    payload: bytes
    failed: bool = False


@dataclass(frozen=True)
class CorpusFile:
    """One input file, its path as the user would name it."""

    path: Path
    format: Format


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
        return [CorpusFile(path, _format(path))]
    if not path.exists():
        raise UserError(f"corpus {path} does not exist; give a file or a folder")
    found = sorted(
        (file for file in path.rglob(pattern) if file.is_file()), key=lambda file: file.as_posix()
    )
    if not found:
        raise UserError(f"corpus folder {path} holds no file that matches {pattern!r}")
    return [CorpusFile(file, _format(file)) for file in found]


def _format(path: Path) -> Format:
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    return _SUFFIXES.get(Path(name).suffix, "text")


def read_records(file: CorpusFile, text_field: str, max_bytes: int) -> Iterator[Record]:
    """Every record of a file in order.

    A file that breaks off (a truncated archive, a disk error) yields what it holds and then one
    failed record; a record above ``max_bytes`` is a failed record; nothing is raised.

    Args:
        text_field: the column of a Parquet file.
        max_bytes: the longest payload that is read.
    """
    line = 0
    try:
        for record in _READERS[file.format](file.path, text_field, max_bytes):
            line = record.line
            yield record
    except _READ_ERRORS as error:
        yield Record(line + 1, f"file cannot be read further: {error}".encode(), failed=True)


def _read_lines(path: Path, text_field: str, max_bytes: int) -> Iterator[Record]:
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


def _read_text(path: Path, text_field: str, max_bytes: int) -> Iterator[Record]:
    with _open(path) as stream:
        payload = stream.read(max_bytes + 1)
    yield Record(1, payload) if len(payload) <= max_bytes else _oversized(1, max_bytes)


def _read_parquet(path: Path, text_field: str, max_bytes: int) -> Iterator[Record]:
    with pyarrow.parquet.ParquetFile(path) as table:
        if text_field not in table.schema_arrow.names:
            missing = f"no column {text_field!r} among {table.schema_arrow.names}"
            yield Record(1, missing.encode(), failed=True)
            return
        line = 0
        for batch in table.iter_batches(batch_size=256, columns=[text_field]):
            # As binary: a string column with bad UTF-8 would fail for its whole batch.
            for payload in batch.column(0).cast(pyarrow.large_binary()).to_pylist():
                line += 1
                if payload is None:
                    yield Record(line, b"the text is null", failed=True)
                elif len(payload) > max_bytes:
                    yield _oversized(line, max_bytes)
                else:
                    yield Record(line, payload)


_READERS = {"jsonl": _read_lines, "text": _read_text, "parquet": _read_parquet}


def _oversized(line: int, max_bytes: int) -> Record:
    return Record(line, f"longer than {max_bytes} bytes".encode(), failed=True)


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        # Several frames in a row are one file to zstd's own tools, pzstd writes them.
        decompressor = zstandard.ZstdDecompressor()
        raw = decompressor.stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
        return io.BufferedReader(cast(io.RawIOBase, raw), buffer_size=1 << 20)
    return path.open("rb", buffering=1 << 20)
