"""The results of a suite on a target: a file with a line per item, which a restart goes on from.

Every line ends with a checksum of what is before it: a digit that a disk or an editor changed is
still JSON, and would give other results without a word.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluation_ranks import Ranks
from diffmegatron.evaluation.suite import Item, Record
from diffmegatron.files import clipped, create_file, parse_json, read_bytes, reason, shown

# Instead of an item's record: where the model gave what is no number.
NOT_FINITE = "not_finite"
_MAX_BYTES = 1 << 34
_SEALED = re.compile(rb'(.+), "crc32": "([0-9a-f]{8})"\}')


@dataclass
class Measured:
    """What a suite came to on a target.

    Attributes:
        records: of the items that it was asked, by key, without the keys of those left out.
        left_out: why items were not asked, or do not count, one sentence each.
    """

    records: dict[str, Record] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


class _Line(dict[str, Any]):
    """A record of an earlier process, which names its line if it is not one."""

    def __init__(self, record: Record, place: str) -> None:
        super().__init__(record)
        self._place = place

    def __missing__(self, key: str) -> Any:
        raise self.refused(f"it has no {key!r}")

    def refused(self, why: str) -> UserError:
        return UserError(
            f"{self._place} is no record of this suite: {why}; remove the file to measure again"
        )


class RecordFile:
    """A context that appends records; those of an earlier process are :attr:`records` already.

    The first line says what was asked of which weights. A last line that was not finished is
    dropped. A line whose checksum is not its own is refused.

    Args:
        path: of the file; made where missing.
        header: what a file of other settings, other items or other weights differs in.

    Raises:
        UserError: the file is of another header, is damaged, or cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self._path = path
        self.records: dict[str, Record] = {}
        try:
            if os.path.lexists(path):
                self._read(header)
            if not os.path.lexists(path) or not path.stat().st_size:
                path.parent.mkdir(parents=True, exist_ok=True)
                with create_file(path) as stream:
                    stream.write(sealed_line(header))
            self._stream = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is added."""
        self._stream.close()

    def add(self, key: str, record: Record) -> None:
        """Append an item's record.

        Raises:
            UserError: it cannot be written.
        """
        line = {"item": key} | record
        content = memoryview(sealed_line(line))
        try:
            while content:
                content = content[self._stream.write(content) :]
        except OSError as error:
            raise self._unwritable(error) from None
        self.records[key] = line

    def _read(self, header: dict[str, Any]) -> None:
        content = read_bytes(self._path, max_bytes=_MAX_BYTES)
        *lines, unfinished = content.split(b"\n")
        if unfinished:
            os.truncate(self._path, len(content) - len(unfinished))
        if not lines:
            return
        self._check(self._parsed(1, lines[0]), header)
        for number, line in enumerate(lines[1:], start=2):
            record = self._parsed(number, line)
            key = record.get("item")
            if not isinstance(key, str) or key in self.records:
                raise UserError(
                    f"{shown(self._path)} is damaged at line {number}: it has no item of its own; "
                    "remove the file to measure again"
                )
            self.records[key] = record

    def _parsed(self, number: int, line: bytes) -> _Line:
        place = f"{shown(self._path)} at line {number}"
        sealed = _SEALED.fullmatch(line)
        if sealed is None or sealed[2] != _checksum(sealed[1]):
            raise UserError(
                f"{place} is not as it was written: its checksum is another or missing; remove "
                "the file to measure again"
            )
        return _Line(parse_json(sealed[1] + b"}", Record, place), place)

    def _check(self, found: dict[str, Any], header: dict[str, Any]) -> None:
        asked = json.loads(_json(header))
        if asked != found:
            wrong = [key for key in asked if asked[key] != found.get(key)] or ["keys"]
            raise UserError(
                f"{shown(self._path)} was measured with other {', '.join(wrong)} than is asked for "
                "now; give another --out, or remove the file to measure again"
            )

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write {shown(self._path)}: {reason(error)}")


class SharedRecords:
    """A context in which several processes add records to one file.

    Each has a file of its own in a folder beside it until they meet; then rank 0 takes over what
    lies there, also where other processes, however many, have left it.

    Args:
        path: as of :class:`RecordFile`.
        header: likewise.
        ranks: the processes; a single one adds to the file itself.

    Attributes:
        records: of all processes when they last met, by key.

    Raises:
        UserError: as :class:`RecordFile`.
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
        """Append an item's record.

        Raises:
            UserError: it cannot be written.
        """
        if self._own is None:
            part = self._parts / f"{self._ranks.rank:05d}.jsonl"
            self._own = RecordFile(part if self._ranks.count > 1 else self._path, self._header)
        self._own.add(key, record)

    def gather(self, order: Sequence[str]) -> None:
        """Meet the other processes, and know the records of all.

        Args:
            order: keys of items that the processes have asked, in the order of the file, as far as
                their records are new.

        Raises:
            UserError: a file is damaged or cannot be written, or it has no record of such an item.
        """
        self._close()
        self._ranks.meet()
        if self._ranks.is_main:
            self._take_over(order)
        self._ranks.meet()
        with RecordFile(self._path, self._header) as file:
            self.records = file.records
        missing = sum(key not in self.records for key in order)
        if missing:
            raise UserError(
                f"{shown(self._path)} lacks {missing} items that were measured, as its folder was "
                "moved or replaced meanwhile; put it back, or run the same command again"
            )

    def _close(self) -> None:
        if self._own is not None:
            self._own.close()
        self._own = None

    def _take_over(self, order: Sequence[str]) -> None:
        parts, found = sorted(self._parts.glob("*.jsonl")), dict[str, Record]()
        for part in parts:
            with RecordFile(part, self._header) as file:
                found |= file.records
        with RecordFile(self._path, self._header) as file:
            for key in dict.fromkeys((*order, *found)):
                if key in found and key not in file.records:
                    file.add(key, found[key])
        try:
            for part in parts:
                part.unlink()
            if parts:
                self._parts.rmdir()
        except OSError as error:
            raise UserError(f"cannot write {shown(self._parts)}: {reason(error)}") from None


def check_records(records: Iterable[Record], read: Callable[[Record], object]) -> None:
    """See to it that the records of an earlier process can be read.

    Raises:
        UserError: one cannot; where it stands.
    """
    for record in records:
        if isinstance(record, _Line) and NOT_FINITE not in record:
            try:
                read(record)
            except (TypeError, ValueError, AttributeError) as error:
                raise record.refused(clipped(str(error))) from None


def digest(items: Sequence[Item]) -> str:
    """Of all that is asked."""
    found = hashlib.sha256()
    for item in items:
        found.update(repr(tuple(item)).encode())
    return found.hexdigest()


def sealed_line(entry: dict[str, Any]) -> bytes:
    """Return an entry as a line of JSON whose last key is the CRC-32 of the bytes before that key.

    Args:
        entry: not empty, without a key ``crc32``.
    """
    content = _json(entry).removesuffix(b"}")
    return content + b', "crc32": "%s"}\n' % _checksum(content)


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


def _json(entry: dict[str, Any]) -> bytes:
    # A NaN would be no JSON: it is an error of the suite that gives it.
    return json.dumps(entry, allow_nan=False, ensure_ascii=False).encode()
