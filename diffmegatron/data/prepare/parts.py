"""Parts of a preparation that machines work on at the same time.

The concatenation of the input files is cut into N ranges of equal bytes. A plain JSONL file can be
cut between two lines; any other file (text, Parquet, an archive) belongs to one part. The documents
of all parts in order are therefore the documents of the whole corpus in order.
"""

import hashlib
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from diffmegatron.data.index.corpus_manifest import (
    Manifest,
    PartRecord,
    manifest_path,
    other_settings,
    parts_folder,
    read_manifest,
)
from diffmegatron.data.prepare.corpus_readers import CorpusFile
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, open_file, printable, reason, shown

MAX_PARTS = 99_999
_NAME = re.compile(r"(\d{5})-of-(\d{5})")
_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """Part ``number`` (from 1) of ``of`` parts."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ``K/N``.

        Raises:
            UserError: the text has another form, or there is no such part.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of <= MAX_PARTS:
            raise UserError(
                f"--part {clipped(text)} is not a part; give K/N, part K of N, with K from 1 to N "
                f"and N up to {MAX_PARTS}, such as 3/8"
            )
        return cls(number, of)

    @classmethod
    def of_name(cls, name: str) -> Self | None:
        """Return the part whose files have this name; None for other names."""
        found = _NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None

    @property
    def name(self) -> str:
        """Name of the part's files in the folder of parts."""
        return f"{self.number:05}-of-{self.of:05}"

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def prefix(self, prefix: Path) -> Path:
        """Return the prefix of the part's files, given the prefix of the whole corpus."""
        return parts_folder(prefix) / self.name


class _Place(NamedTuple):
    """A place in the input: the index of a file and a byte offset within it."""

    file: int
    offset: int


def cut(files: list[CorpusFile], part: Part) -> tuple[list[CorpusFile], PartRecord]:
    """Return the inputs of a part, which may be none, and the record that identifies the part.

    The result depends only on the names and sizes of the files and, where a file is cut, on the
    ends of its lines.

    Raises:
        UserError: a file that is cut cannot be read.
    """
    starts = list(itertools.accumulate((file.size for file in files), initial=0))
    first, last = (_place(files, starts, part, end) for end in (part.number - 1, part.number))
    chosen = []
    for number in range(first.file, min(last.file + 1, len(files))):
        file = files[number]
        before = first.offset if number == first.file else 0
        after = file.size - last.offset if number == last.file else 0
        # One part also reads each empty file, so that an empty archive is detected.
        if before + after < file.size or (not file.size and number < last.file):
            chosen.append(replace(file, before=before, after=after))
    return chosen, PartRecord(number=part.number, of=part.of, corpus=_corpus(files))


def _place(files: list[CorpusFile], starts: list[int], part: Part, number: int) -> _Place:
    """Return the end of part ``number``; the end of a file becomes the start of the next."""
    if number == 0:
        return _Place(0, 0)
    wanted = starts[-1] * number // part.of
    place = bisect_right(starts, wanted) - 1
    if place == len(files):
        return _Place(place, 0)
    file, offset = files[place], wanted - starts[place]
    if file.can_be_cut:
        offset = _next_line(file, offset)
    else:
        offset = file.size if 2 * offset > file.size else 0
    return _Place(place + 1, 0) if offset == file.size else _Place(place, offset)


def _next_line(file: CorpusFile, offset: int) -> int:
    """Return the start of the first line that begins at or after ``offset``, or the file's size."""
    if not offset:
        return 0
    try:
        with open_file(file.path) as stream:
            stream.seek(offset - 1)
            while (piece := stream.readline(_LINE_BYTES)) and not piece.endswith(b"\n"):
                pass
            return min(stream.tell(), file.size)
    except OSError as error:
        raise UserError(f"cannot read {shown(file.path)}: {reason(error)}") from None


def _corpus(files: list[CorpusFile]) -> str:
    """Return a hash that is equal for parts of the same input."""
    listed = [(printable(file.path), file.size) for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def find_parts(prefix: str | Path) -> list[Part]:
    """Return the parts, finished or not, that have files in ``PREFIX.parts``, in order.

    Raises:
        UserError: the parts do not have the same number of parts, or the folder cannot be read.
    """
    folder = parts_folder(prefix)
    try:
        names = [path.name.partition(".")[0] for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {shown(folder)}: {reason(error)}") from None
    found = {part for name in names if (part := Part.of_name(name))}
    numbers = sorted({part.of for part in found})
    if len(numbers) > 1:
        raise UserError(
            f"{shown(folder)} holds parts of {numbers[0]} and parts of {numbers[1]}; delete the "
            "parts of one number"
        )
    return sorted(found, key=lambda part: part.number)


def check_fits(prefix: Path, part: Part, record: PartRecord, settings: Mapping[str, Any]) -> None:
    """Refuse to begin a part that could not be merged with the existing parts.

    Raises:
        UserError: the existing parts have another number of parts, or the first finished part has
            other settings or inputs.
    """
    begun = find_parts(prefix)
    if begun and begun[0].of != part.of:
        raise UserError(
            f"{shown(parts_folder(prefix))} holds parts of {begun[0].of}, and --part {part} is one "
            f"of {part.of}; give K/{begun[0].of}, or delete them"
        )
    for other in begun:
        if other != part and manifest_path(other.prefix(prefix)).exists():
            manifest = read_manifest(other.prefix(prefix))
            problem = difference(manifest, settings, record)
            if problem:
                raise UserError(
                    f"{shown(other.prefix(prefix))} was prepared {problem}, and all parts must be "
                    "prepared alike; use the same settings and inputs, or delete that part"
                )
            return


def difference(manifest: Manifest, settings: Mapping[str, Any], part: PartRecord) -> str:
    """Return how a finished part differs from this preparation; empty if it belongs to it."""
    if manifest.settings.get("tokenizer_sha256") != settings["tokenizer_sha256"]:
        return f"with tokenizer {clipped(repr(manifest.tokenizer.name))}"
    if others := other_settings(manifest.settings, settings):
        return f"with {', '.join(others)}"
    if manifest.part is None or manifest.part.corpus != part.corpus:
        return "from other input files (their names or sizes)"
    return ""
