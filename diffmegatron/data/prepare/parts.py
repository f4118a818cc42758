"""Parts of a preparation (``prepare --part K/N``), which several machines prepare in parallel.

The concatenated input files are cut into N ranges of about equal size. Only plain JSONL files are
cut, between two lines.
"""

import hashlib
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

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
from diffmegatron.files import format_path, open_file, os_error_text, printable, shorten

MAX_PARTS = 99_999
_NAME = re.compile(r"(\d{5})-of-(\d{5})")
_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """Part K/N of a preparation: ``number`` is K, counted from 1, and ``of`` is N."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text ``K/N`` with 1 <= K <= N <= 99,999."""
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of <= MAX_PARTS:
            raise UserError(
                f"--part {shorten(text)} is not a part; give K/N, part K of N, with K from 1 to N "
                f"and N up to {MAX_PARTS}, such as 3/8"
            )
        return cls(number, of)

    @classmethod
    def of_name(cls, name: str) -> Self | None:
        """Return the part with this :attr:`name`; None if ``name`` is not the name of a part."""
        found = _NAME.fullmatch(name)
        return cls(*map(int, found.groups())) if found else None

    @property
    def name(self) -> str:
        """Name of the part's files in ``PREFIX.parts`` without endings, such as 00003-of-00008."""
        return f"{self.number:05}-of-{self.of:05}"

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def prefix(self, prefix: Path) -> Path:
        """Return the prefix of the part's files from the prefix of the whole corpus."""
        return parts_folder(prefix) / self.name


def cut(files: list[CorpusFile], part: Part) -> tuple[list[CorpusFile], PartRecord]:
    """Return the files, or ranges of files, that a part reads (possibly none), and its record."""
    starts = list(itertools.accumulate((file.size for file in files), initial=0))
    first, begin = _place(files, starts, part, part.number - 1)
    last, end = _place(files, starts, part, part.number)
    chosen = []
    for number in range(first, min(last + 1, len(files))):
        file = files[number]
        before = begin if number == first else 0
        after = file.size - end if number == last else 0
        # An empty file has no bytes to divide, but one part must still read it: an archive of 0
        # bytes is damaged, and only reading it reports the error.
        if before + after < file.size or (not file.size and number < last):
            chosen.append(replace(file, before=before, after=after))
    listed = json.dumps([(printable(file.path), file.size) for file in files])
    corpus = hashlib.sha256(listed.encode()).hexdigest()
    return chosen, PartRecord(number=part.number, of=part.of, corpus=corpus)


def _place(files: list[CorpusFile], starts: list[int], part: Part, number: int) -> tuple[int, int]:
    """Return the file index and the byte offset at which part ``number`` of ``part.of`` ends.

    The ideal place is byte ``number / part.of`` of the input. A JSONL file is cut at the next start
    of a line. Another file is moved to the nearer of its ends. The end of a file is the start of
    the next one. ``starts`` has the first byte of each file and the total size.
    """
    if number == 0:
        return 0, 0
    wanted = starts[-1] * number // part.of
    place = bisect_right(starts, wanted) - 1
    if place == len(files):
        return place, 0
    file, offset = files[place], wanted - starts[place]
    if file.can_be_cut:
        offset = _next_line(file, offset)
    else:
        offset = file.size if 2 * offset > file.size else 0
    return (place + 1, 0) if offset == file.size else (place, offset)


def _next_line(file: CorpusFile, offset: int) -> int:
    """Return the byte at which the first line at or after ``offset`` begins, or the file size."""
    if not offset:
        return 0
    try:
        with open_file(file.path) as stream:
            stream.seek(offset - 1)
            while (piece := stream.readline(_LINE_BYTES)) and not piece.endswith(b"\n"):
                pass
            return min(stream.tell(), file.size)
    except OSError as error:
        raise UserError(f"cannot read {format_path(file.path)}: {os_error_text(error)}") from None


def find_parts(prefix: str | Path) -> list[Part]:
    """Return the parts, finished or not, that have files in ``PREFIX.parts``, in order."""
    folder = parts_folder(prefix)
    try:
        names = [path.name.partition(".")[0] for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {format_path(folder)}: {os_error_text(error)}") from None
    found = {part for name in names if (part := Part.of_name(name))}
    numbers = sorted({part.of for part in found})
    if len(numbers) > 1:
        raise UserError(
            f"{format_path(folder)} contains parts K/{numbers[0]} and parts K/{numbers[1]}; delete "
            "the parts of one number"
        )
    return sorted(found, key=lambda part: part.number)


def check_fits(prefix: Path, part: Part, record: PartRecord, settings: Mapping[str, Any]) -> None:
    """Refuse to begin a part that could not be merged with the existing parts."""
    begun = find_parts(prefix)
    if begun and begun[0].of != part.of:
        raise UserError(
            f"{format_path(parts_folder(prefix))} contains parts K/{begun[0].of}, and --part "
            f"{part} is not one; give K/{begun[0].of}, or delete them"
        )
    for other in begun:
        if other != part and manifest_path(other.prefix(prefix)).exists():
            manifest = read_manifest(other.prefix(prefix))
            problem = difference(manifest, settings, record)
            if problem:
                raise UserError(
                    f"{format_path(other.prefix(prefix))} was prepared {problem}, and all parts "
                    "must be prepared alike; use the same settings and inputs, or delete that part"
                )
            return


def difference(manifest: Manifest, settings: Mapping[str, Any], part: PartRecord) -> str:
    """Complete the sentence "The part was prepared ...", e.g. "from other input files".

    The result is "" if the part fits to the preparation with these ``settings`` and this ``part``.
    """
    if manifest.settings.get("tokenizer_sha256") != settings["tokenizer_sha256"]:
        return f"with tokenizer {shorten(repr(manifest.tokenizer.name))}"
    if others := other_settings(manifest.settings, settings):
        return f"with {', '.join(others)}"
    if manifest.part is None or manifest.part.corpus != part.corpus:
        return "from other input files (their names or sizes)"
    return ""
