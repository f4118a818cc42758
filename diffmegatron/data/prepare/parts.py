"""Parts of a preparation, which machines do at once: which inputs each has, and where they lie.

The input files, end to end, are cut into N ranges of equally many bytes. A plain file of JSON
lines is cut between two lines; any other file (text, Parquet, an archive) belongs to one part. So
the documents of the parts, one part after the other, are those of the whole in their order.
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
    """One of ``of`` parts, counted from 1."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """``K/N`` of the command line.

        Raises:
            UserError: it is something else, or there is no such part.
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
        """The part whose files begin with that name, if it is one of :attr:`name`'s."""
        found = _NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None

    @property
    def name(self) -> str:
        """Of its files in the folder of parts."""
        return f"{self.number:05}-of-{self.of:05}"

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def prefix(self, prefix: Path) -> Path:
        """Of its files, the whole being at ``prefix``."""
        return parts_folder(prefix) / self.name


class _Place(NamedTuple):
    """A place in the input: a file's number, and bytes of it that lie before."""

    file: int
    offset: int


def cut(files: list[CorpusFile], part: Part) -> tuple[list[CorpusFile], PartRecord]:
    """What a part reads, which may be nothing, and what tells it from others.

    A function of the files alone: of their names, sizes and, where one is cut, the end of a line.

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
        # An empty file is read too, by one part: that an archive is empty has to be found.
        if before + after < file.size or (not file.size and number < last.file):
            chosen.append(replace(file, before=before, after=after))
    return chosen, PartRecord(number=part.number, of=part.of, corpus=_corpus(files))


def _place(files: list[CorpusFile], starts: list[int], part: Part, number: int) -> _Place:
    """Where part ``number`` ends and the next begins; never at the end of a file."""
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
    """Where the first line begins that does not begin before ``offset``; the file's end if none."""
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
    """Equal for parts of the same input."""
    listed = [(printable(file.path), file.size) for file in files]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def find_parts(prefix: str | Path) -> list[Part]:
    """Of which something is in ``PREFIX.parts``, finished or not, in order.

    Raises:
        UserError: they are not parts of one number, or the folder cannot be read.
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
            f"{shown(folder)} holds parts of {numbers[0]} and parts of {numbers[1]}; delete those "
            "that you do not want"
        )
    return sorted(found, key=lambda part: part.number)


def check_fits(prefix: Path, part: Part, record: PartRecord, settings: Mapping[str, Any]) -> None:
    """Refuse to begin a part that could not be merged with those that are there.

    Raises:
        UserError: they are of another number of parts, or the first that is finished is of other
            settings or another input.
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
                    "prepared alike; give the same, or delete that part"
                )
            return


def difference(manifest: Manifest, settings: Mapping[str, Any], part: PartRecord) -> str:
    """Why a finished part does not belong to the same preparation; empty: it is."""
    if manifest.settings.get("tokenizer_sha256") != settings["tokenizer_sha256"]:
        return f"with tokenizer {clipped(repr(manifest.tokenizer.name))}"
    if others := other_settings(manifest.settings, settings):
        return f"with {', '.join(others)}"
    if manifest.part is None or manifest.part.corpus != part.corpus:
        return "from other input files (their names or sizes)"
    return ""
