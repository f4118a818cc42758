"""Readers of published data sets in files under ``--data-dir``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import AliasChoices, BaseModel, Field

from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, parse_json, read_bytes, shorten
from diffmegatron.validation import validated

_Example = TypeVar("_Example")
Reader = Callable[[Path], Iterator[_Example]]
Named = TypeVar("Named")
DATA_DIR = Field(description="folder with the files of published data sets")
_LINES = ".jsonl"
_OTHER_ENDINGS = (".jsonl.gz", ".jsonl.zst", ".parquet")
_MAX_ROW_BYTES = 1 << 28
_MAX_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class DataSet(Generic[_Example]):
    """A data set in a file under ``--data-dir``, in the format in which it was published.

    If ``file`` ends with ``.jsonl`` and is missing, a compressed or Parquet file of the same stem
    is read. ``origin`` describes the format and the source of the file in error messages.
    """

    file: str
    read: Reader[_Example]
    origin: str

    def examples(self, data_dir: Path, count: int | None = None) -> list[_Example]:
        """Return the first ``count`` examples, or all examples if ``count`` is None."""
        path = self._path(data_dir)
        found = list(islice(self.read(path), count))
        if not found:
            raise UserError(f"{format_path(path)} is empty; it must be {self.origin}")
        return found

    def _path(self, data_dir: Path) -> Path:
        path = data_dir / self.file
        others = _OTHER_ENDINGS if self.file.endswith(_LINES) else ()
        for each in (path, *(path.with_suffix(ending) for ending in others)):
            if each.exists():
                return each
        tried = f" (nor with {', '.join(others)})" if others else ""
        raise UserError(f"{format_path(path)} does not exist{tried}; it must be {self.origin}")


class Row(BaseModel, ABC):
    """Base class of the rows of published data sets.

    The fields of a subclass are the JSON keys or Parquet columns that evaluation uses.
    """

    @abstractmethod
    def examples(self, name: str) -> Iterator[Any]:
        """Yield the examples of the row; ``name`` identifies the row in error messages."""


def json_lines(row: type[Row]) -> Reader[Any]:
    """Return a reader that yields the examples of all rows of a JSON-lines or Parquet file.

    ``row`` is the class of the rows.
    """

    def read(path: Path) -> Iterator[Any]:
        (file,) = find_files([path], "*")
        for record in read_records(file, tuple(_columns(row)), _MAX_ROW_BYTES):
            name = f"{format_path(path)} at line {record.line}"
            if record.problem:
                raise UserError(f"{name} cannot be read: {record.problem}")
            if isinstance(record.payload, bytes):
                found: Row = parse_json(record.payload, row, name)
            else:
                found = validated(row, record.payload, name)
            yield from found.examples(name)

    return read


def json_file(schema: Any) -> Reader[Any]:
    """Return a reader that yields the examples of all rows of a JSON file.

    ``schema`` is the type of the whole content: ``list[R]`` or ``dict[str, R]`` for a row class R.
    """

    def read(path: Path) -> Iterator[Any]:
        content = read_bytes(path, max_bytes=_MAX_FILE_BYTES)
        rows = parse_json(content, schema, format_path(path))
        for number, row in rows.items() if isinstance(rows, dict) else enumerate(rows, start=1):
            yield from row.examples(f"{format_path(path)} at row {number}")

    return read


def choose(names: Sequence[str], known: Mapping[str, Named], kind: str) -> list[Named]:
    """Return ``known[name]`` for each name. The error for an unknown name begins with ``kind``."""
    for name in names:
        if name not in known:
            raise UserError(
                f"{kind} {shorten(repr(name))} is unknown; choose from {', '.join(known)}"
            )
    return [known[name] for name in names]


def _columns(row: type[Row]) -> Iterator[str]:
    for name, field in row.model_fields.items():
        alias = field.validation_alias
        yield from map(str, alias.choices) if isinstance(alias, AliasChoices) else (name,)
