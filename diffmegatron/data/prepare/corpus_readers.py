"""Read corpus files as raw records (one record per document), in a fixed order."""

import gzip
import io
import math
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, NoReturn, cast

import pyarrow
import pyarrow.parquet
import zstandard
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, open_file, os_error_text, shorten

Format = Literal["jsonl", "parquet", "text"]
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
_ARCHIVES = (".gz", ".zst")
# Errors that the libraries raise for a damaged or truncated file.
_READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError, pyarrow.ArrowException)
_READ_BYTES = 1 << 20
# Compressed bytes per call of the zstd decompressor. A call can return 32,768 times as many bytes,
# so a small number limits the memory.
_ZSTD_BYTES = 1 << 12


class CorpusRecord(NamedTuple):
    """One raw document of a file."""

    line: int  # line or row, counted from 1 at the start of the range that is read
    # A line of JSONL, a plain text, or a Parquet row as {column: value} with strings as bytes.
    payload: bytes | dict[str, Any]
    problem: str | None = None  # why the document cannot be read; the payload is then empty

    @property
    def payload_bytes(self) -> int:
        """Size of the payload in bytes; for a Parquet row, the total size of its strings."""
        if isinstance(self.payload, bytes):
            return len(self.payload)
        return sum(len(value) for value in self.payload.values() if isinstance(value, bytes))


class Fingerprint(NamedTuple):
    """Size in bytes, modification time in ns and inode, which reveal a change of a file."""

    size: int
    modified: int
    inode: int


@dataclass(frozen=True)
class CorpusFile:
    """Input file, or a range of it for one part of a preparation."""

    path: Path
    format: Format
    fingerprint: Fingerprint  # of the whole file, when it was found
    before: int = 0  # bytes before the range
    after: int = 0  # bytes after the range

    @property
    def size(self) -> int:
        """Number of bytes of the range."""
        return self.fingerprint.size - self.before - self.after

    @property
    def can_be_cut(self) -> bool:
        """True if the file may be divided between parts, at the end of any line."""
        return self.format == "jsonl" and self.path.suffix not in _ARCHIVES

    def check_unchanged(self) -> None:
        """Raise a UserError if the file was changed or removed since it was found."""
        try:
            changed = "was changed" if _fingerprint(self.path.stat()) != self.fingerprint else None
        except OSError:
            changed = "was removed"
        if changed:
            raise UserError(
                f"corpus file {format_path(self.path)} {changed} while it was read; leave it "
                "unchanged, and start again with --restart"
            )


def find_files(inputs: list[Path], pattern: str) -> list[CorpusFile]:
    """Return the files of a corpus in the order of ``inputs``; a folder's files are sorted.

    ``pattern`` is a glob such as ``*.py`` for the files within folders, at any depth.
    """
    if not pattern:
        raise UserError("--pattern is empty; give one such as '*' or '*.jsonl'")
    return [_corpus_file(file) for path in inputs for file in _find(path, pattern)]


def _find(path: Path, pattern: str) -> list[Path]:
    if not os.path.lexists(path):  # Path.exists would raise an error if the name is too long.
        raise UserError(f"corpus {format_path(path)} does not exist; give a file or a folder")
    if not path.is_dir():
        return [path]
    found = [
        Path(folder, name)
        # Without onerror, an unreadable folder would be skipped silently.
        for folder, _, names in os.walk(path, onerror=_refuse_folder)
        for name in names
        if Path(folder, name).relative_to(path).match(pattern)
    ]
    if not found:
        raise UserError(f"corpus folder {format_path(path)} holds no file that matches {pattern!r}")
    return sorted(found, key=lambda file: file.as_posix())


def _refuse_folder(error: OSError) -> NoReturn:
    raise UserError(
        f"cannot read corpus folder {format_path(Path(error.filename))}: {os_error_text(error)}"
    )


def _corpus_file(path: Path) -> CorpusFile:
    name = path.with_suffix("") if path.suffix in _ARCHIVES else path
    with open_file(path) as stream:
        fingerprint = _fingerprint(os.fstat(stream.fileno()))
    return CorpusFile(path, _SUFFIXES.get(name.suffix, "text"), fingerprint)


def _fingerprint(status: os.stat_result) -> Fingerprint:
    return Fingerprint(status.st_size, status.st_mtime_ns, status.st_ino)


def read_records(
    file: CorpusFile, columns: tuple[str, ...], max_bytes: int
) -> Iterator[CorpusRecord]:
    """Yield the records of a file in order.

    A record of more than ``max_bytes`` bytes has a ``problem`` and no payload. From a Parquet file,
    only ``columns`` are read; columns that the file lacks are ignored.
    """
    line = 0
    try:
        for record in _READERS[file.format](file, columns, max_bytes):
            line = record.line
            yield record
    except _READ_ERRORS as error:
        file.check_unchanged()
        raise UserError(
            f"corpus file {format_path(file.path)} cannot be read beyond document {line}"
            f"{f' after byte {file.before}' if file.before else ''}: "
            f"{shorten(str(error))}; correct it or leave it out, and start again with --restart"
        ) from None
    file.check_unchanged()


def _read_lines(
    file: CorpusFile, columns: tuple[str, ...], max_bytes: int
) -> Iterator[CorpusRecord]:
    with _open(file.path) as stream:
        if file.before:
            stream.seek(file.before)
        left = file.size if file.after else math.inf
        line = 0
        while left > 0 and (payload := stream.readline(max_bytes + 2)):
            line += 1
            left -= len(payload)
            if len(payload.rstrip(b"\r\n")) <= max_bytes:
                yield CorpusRecord(line, payload)
                continue
            while payload and not payload.endswith(b"\n"):
                payload = stream.readline(_READ_BYTES)
                left -= len(payload)
            yield _oversized(line, max_bytes)


def _read_text(
    file: CorpusFile, columns: tuple[str, ...], max_bytes: int
) -> Iterator[CorpusRecord]:
    with _open(file.path) as stream:
        payload = stream.read(max_bytes + 1)
    yield CorpusRecord(1, payload) if len(payload) <= max_bytes else _oversized(1, max_bytes)


def _read_parquet(
    file: CorpusFile, columns: tuple[str, ...], max_bytes: int
) -> Iterator[CorpusRecord]:
    with (
        open_file(file.path) as stream,
        # A page without a checksum is accepted.
        pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True) as table,
    ):
        present = [name for name in columns if name in table.schema_arrow.names]
        line = 0
        if not present:
            # Arrow yields no rows if no column is read, and the file would seem to be empty.
            yield from (CorpusRecord(row + 1, {}) for row in range(table.metadata.num_rows))
            return
        for batch in table.iter_batches(batch_size=256, columns=present):
            for row in _rows(_as_bytes(batch)):
                line += 1
                record = (
                    CorpusRecord(line, b"", row)
                    if isinstance(row, str)
                    else CorpusRecord(line, row)
                )
                yield _oversized(line, max_bytes) if record.payload_bytes > max_bytes else record
        if line != table.metadata.num_rows:
            raise EOFError(f"its header has {table.metadata.num_rows} rows")


def _rows(batch: pyarrow.RecordBatch) -> Iterator[dict[str, Any] | str]:
    """Yield each row as a dictionary, or as a text with the reason why its conversion failed."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            yield f"a value cannot be read: {error}"
            return
        for number in range(len(batch)):
            yield from _rows(batch.slice(number, 1))


def _as_bytes(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Convert strings to binary, so that ``to_pylist`` does not fail because of invalid UTF-8."""
    columns = [
        column.cast(pyarrow.large_binary())
        if pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)
        else column
        for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


_READERS = {"jsonl": _read_lines, "text": _read_text, "parquet": _read_parquet}


def _oversized(line: int, max_bytes: int) -> CorpusRecord:
    return CorpusRecord(line, b"", f"longer than {max_bytes} bytes")


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file; decompress .gz and .zst. An empty or truncated archive raises an EOFError."""
    with open_file(path, buffering=_READ_BYTES) as raw:
        if path.suffix not in _ARCHIVES:
            yield raw
            return
        if not raw.peek(1):  # type: ignore[attr-defined]
            raise EOFError("the archive is empty")
        unpacked = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else _ZstdFile(raw)
        with io.BufferedReader(cast(io.RawIOBase, unpacked), buffer_size=_READ_BYTES) as stream:
            yield stream


class _ZstdFile(io.RawIOBase):
    """Content of a zstd archive of one or more frames.

    The reader of the zstandard library is not used, because it ends without an error at a truncated
    frame.
    """

    def __init__(self, archive: BinaryIO) -> None:
        self._archive = archive
        self._frame: Any = None
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)
        while not self._unpacked and (packed := self._archive.read(_ZSTD_BYTES)):
            self._unpacked = memoryview(self._unpack(packed))
        if not self._unpacked and self._frame is not None:
            raise EOFError("the archive ends within a frame")
        count = min(len(target), len(self._unpacked))
        target[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self, packed: bytes) -> bytes:
        parts = []
        while packed:
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            parts.append(self._frame.decompress(packed))
            packed, self._frame = (
                (self._frame.unused_data, None) if self._frame.eof else (b"", self._frame)
            )
        return b"".join(parts)
