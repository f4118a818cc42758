"""Files with the records of a suite (benchmark) for a target (model), one line per item.

A restarted evaluation resumes from these files. Every line ends with a checksum, so a changed digit
causes an error instead of a wrong result.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import distributed

from diffmegatron.errors import UserError
from diffmegatron.evaluation.suite import Item, Record
from diffmegatron.files import (
    create_file,
    explain_os_errors,
    format_path,
    parse_json,
    read_bytes,
    shorten,
)

# Key in the record of an item for which the model computed NaN or infinity; its value is a message.
NOT_FINITE = "not_finite"
_MAX_BYTES = 1 << 34
# Pattern of a line that `sealed_line` has written. Its groups are the content and the checksum.
_SEALED = re.compile(rb'(.+), "crc32": "([0-9a-f]{8})"\}')


@dataclass
class Measured:
    """Records of a suite on a target by item key, and sentences about items that are left out."""

    records: dict[str, Record] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


class _Line(dict[str, Any]):
    """A record that was read from a file; error messages name the file and line."""

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(record)
        self._place = place

    def __missing__(self, key: str) -> Any:
        raise self.refused(f"it has no {key!r}")

    def refused(self, why: str) -> UserError:
        return UserError(
            f"{self._place} is not a record of this suite: {why}; remove the file to measure again"
        )


class RecordFile:
    """Context manager that reads the records of a file and appends new records.

    The header is the first line of the file. It has all values on which the records depend, such as
    the settings and the hash of the weights. A wrong checksum or a different header is an error. An
    unfinished last line is dropped. ``records`` maps the key of each item to its record.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self.records: dict[str, Record] = {}
        with explain_os_errors(f"cannot write {format_path(self._path)}"):
            if os.path.lexists(path):
                self._read(header)
            if not os.path.lexists(path) or not path.stat().st_size:
                path.parent.mkdir(parents=True, exist_ok=True)
                with create_file(path) as stream:
                    stream.write(sealed_line(header))
            self._stream = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def add(self, key: str, record: Record) -> None:
        """Append an item's record."""
        line = {"item": key} | record
        content = memoryview(sealed_line(line))
        with explain_os_errors(f"cannot write {format_path(self._path)}"):
            while content:
                content = content[self._stream.write(content) :]
        self.records[key] = line

    def _read(self, header: dict[str, Any]) -> None:
        content = read_bytes(self._path, max_bytes=_MAX_BYTES)
        *lines, unfinished = content.split(b"\n")
        if unfinished:
            os.truncate(self._path, len(content) - len(unfinished))
        if not lines:
            return
        found, wanted = self._parsed(1, lines[0]), json.loads(_json(header))
        if found != wanted:
            wrong = [key for key in wanted if wanted[key] != found.get(key)] or ["keys"]
            raise UserError(
                f"{format_path(self._path)} has results for other {', '.join(wrong)}; give another "
                "--out, or remove the file to measure again"
            )
        for number, line in enumerate(lines[1:], start=2):
            record = self._parsed(number, line)
            key = record.get("item")
            if not isinstance(key, str) or key in self.records:
                raise UserError(
                    f"{format_path(self._path)} is damaged at line {number}: its item is missing "
                    "or repeated; remove the file to measure again"
                )
            self.records[key] = record

    def _parsed(self, number: int, line: bytes) -> _Line:
        place = f"{format_path(self._path)} at line {number}"
        sealed = _SEALED.fullmatch(line)
        if sealed is None or sealed[2] != _checksum(sealed[1]):
            raise UserError(
                f"{place} was changed: its checksum is wrong or missing; remove the file to "
                "measure again"
            )
        return _Line(parse_json(sealed[1] + b"}", Record, place), place)


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, and number of processes; all processes share a file system."""

    rank: int
    count: int

    @property
    def is_main(self) -> bool:
        """True for the process that writes shared files and prints progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        if self.count > 1:
            distributed.barrier()


class SharedRecords:
    """Context manager with which several processes add records to one shared file.

    Each process writes to a file of its own, in a folder beside the shared file. If there is only
    one process, it writes to the shared file itself. :meth:`gather` moves all records, also
    the records of killed processes, into the shared file. Only :meth:`gather` updates ``records``.
    """

    def __init__(self, path: Path, header: dict[str, Any], ranks: Ranks) -> None:
        self._path, self._header, self._ranks = path, header, ranks
        self._parts = path.with_suffix(".ranks")
        self._own: RecordFile | None = None
        self.records: dict[str, Record] = {}

    def __enter__(self) -> Self:
        self.gather(())
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def add(self, key: str, record: Record) -> None:
        """Append an item's record to the file of this process."""
        if self._own is None:
            part = self._parts / f"{self._ranks.rank:05d}.jsonl"
            self._own = RecordFile(part if self._ranks.count > 1 else self._path, self._header)
        self._own.add(key, record)

    def gather(self, order: Sequence[str]) -> None:
        """Move the records of all processes into the shared file, and read it into ``records``.

        Every process must call this method, and waits for the others. New records are appended in
        the order of the keys ``order``, which must all have a record. Other records follow them.
        """
        self._close()
        self._ranks.barrier()
        if self._ranks.is_main:
            self._merge(order)
        self._ranks.barrier()
        with RecordFile(self._path, self._header) as file:
            self.records = file.records
        missing = sum(key not in self.records for key in order)
        if missing:
            raise UserError(
                f"{format_path(self._path)} lacks {missing} measured items, because its folder was "
                "moved or replaced meanwhile; restore it, or run the same command again"
            )

    def _close(self) -> None:
        if self._own is not None:
            self._own.close()
        self._own = None

    def _merge(self, order: Sequence[str]) -> None:
        parts, found = sorted(self._parts.glob("*.jsonl")), dict[str, Record]()
        for part in parts:
            with RecordFile(part, self._header) as file:
                found |= file.records
        with RecordFile(self._path, self._header) as file:
            for key in dict.fromkeys((*order, *found)):
                if key in found and key not in file.records:
                    file.add(key, found[key])
        with explain_os_errors(f"cannot write {format_path(self._parts)}"):
            for part in parts:
                part.unlink()
            if parts:
                self._parts.rmdir()


def check_records(records: Iterable[Record], read: Callable[[Record], object]) -> None:
    """Call ``read`` on each record from a file, except those with the key ``NOT_FINITE``.

    If ``read`` fails, raise a UserError that names the file and the line of the record.
    """
    for record in records:
        if isinstance(record, _Line) and NOT_FINITE not in record:
            try:
                read(record)
            except (TypeError, ValueError, AttributeError) as error:
                raise record.refused(shorten(str(error))) from None


def digest(items: Sequence[Item]) -> str:
    """Return the SHA-256 hash, in hexadecimal digits, of the ``repr`` of all items."""
    found = hashlib.sha256()
    for item in items:
        found.update(repr(tuple(item)).encode())
    return found.hexdigest()


def sealed_line(entry: dict[str, Any]) -> bytes:
    """Return an entry as a line of JSON that ends with the CRC-32 of the bytes before it."""
    content = _json(entry).removesuffix(b"}")
    return content + b', "crc32": "%s"}\n' % _checksum(content)


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


def _json(entry: dict[str, Any]) -> bytes:
    # JSON has no NaN. A suite with NaN in a record has a bug, so let this raise a ValueError.
    return json.dumps(entry, allow_nan=False, ensure_ascii=False).encode()
