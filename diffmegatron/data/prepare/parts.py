"""Parts of a preparation (``prepare --part K/N``), which several machines prepare in parallel.

The concatenated input files are cut into N ranges of about equal size. Within a file, a cut is
possible only at the start of a line of uncompressed JSONL.

``diffmegatron data merge`` writes ``PREFIX.idx`` and ``PREFIX.json`` of the whole corpus; the
tokens stay in ``PREFIX.parts``. The merged index equals that of a single ``prepare``, except that
``--deduplicate`` finds duplicates only within a part.
"""

import hashlib
import itertools
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError
from rich.console import Console
from rich.progress import track

from diffmegatron.data.index.corpus_manifest import (
    CorpusManifest,
    FileRecord,
    LengthBin,
    PartRecord,
    check_hash,
    check_hashes,
    check_sizes,
    file_record,
    manifest_path,
    other_settings,
    parts_folder,
    pieces,
    read_corpus_manifest,
)
from diffmegatron.data.index.index_file import merge_indexes
from diffmegatron.data.prepare.corpus_readers import CorpusFile
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import (
    format_path,
    open_file,
    os_error_text,
    printable,
    shorten,
    write_durably,
)

MAX_PARTS = 99_999
_NAME = re.compile(r"(\d{5})-of-(\d{5})")
_LINE_BYTES = 1 << 20
_LISTED = 8
_COUNTS = ("documents", "tokens", "text_bytes", "rejected", "empty", "duplicates")


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
        """Return the prefix of the part's files; the argument is the prefix of the whole corpus."""
        return parts_folder(prefix) / self.name


def cut(files: list[CorpusFile], part: Part) -> tuple[list[CorpusFile], PartRecord]:
    """Return the files or ranges of files that a part reads (possibly none), and its PartRecord."""
    starts = list(itertools.accumulate((file.size for file in files), initial=0))
    first, begin = _place(files, starts, part, part.number - 1)
    last, end = _place(files, starts, part, part.number)
    chosen = []
    for number in range(first, min(last + 1, len(files))):
        file = files[number]
        before = begin if number == first else 0
        after = file.size - end if number == last else 0
        # An empty file also belongs to a part, so that an archive of 0 bytes causes an error.
        if before + after < file.size or (not file.size and number < last):
            chosen.append(replace(file, before=before, after=after))
    listed = json.dumps([(printable(file.path), file.size) for file in files])
    corpus = hashlib.sha256(listed.encode()).hexdigest()
    return chosen, PartRecord(number=part.number, of=part.of, corpus=corpus)


def _place(files: list[CorpusFile], starts: list[int], part: Part, number: int) -> tuple[int, int]:
    """Return the file index and the byte offset at which part ``number`` of ``part.of`` ends.

    The ideal place is the fraction ``number / part.of`` of all input bytes. Within uncompressed
    JSONL, the place moves to the next start of a line. Within another file, it moves to the start
    or the end of the file, whichever is nearer. The end of a file is returned as the start of the
    next file. ``starts`` are the offsets of the files in the concatenated input, followed by its
    total size.
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
    """Return the offset of the first line that begins at or after ``offset``, or the file size."""
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
            manifest = read_corpus_manifest(other.prefix(prefix))
            problem = _difference(manifest, settings, record)
            if problem:
                raise UserError(
                    f"{format_path(other.prefix(prefix))} was prepared {problem}, and all parts "
                    "must be prepared alike; use the same settings and inputs, or delete that part"
                )
            return


def _difference(manifest: CorpusManifest, settings: Mapping[str, Any], part: PartRecord) -> str:
    """Return how the preparation of ``manifest`` differs from another one, or "" if it does not.

    ``settings`` and ``part`` describe the other preparation. The text completes the sentence "This
    part was prepared ...", e.g. "from other input files".
    """
    if manifest.settings.get("tokenizer_sha256") != settings["tokenizer_sha256"]:
        return f"with tokenizer {shorten(repr(manifest.tokenizer.name))}"
    if others := other_settings(manifest.settings, settings):
        return f"with {', '.join(others)}"
    if manifest.part is None or manifest.part.corpus != part.corpus:
        return "from other input files (their names or sizes)"
    return ""


def merge(prefix: Path, *, show_progress: bool = True) -> CorpusManifest:
    """Merge the parts of a corpus; if they are merged already, verify the merged corpus."""
    resource = f"the parts of {format_path(prefix)}"
    try:
        with FileLock(Path(f"{prefix}.lock"), resource, "merge others"):
            parts = _complete(prefix)
            manifests = {part.prefix(prefix): _read(prefix, part) for part in parts}
            _check_alike(parts, manifests)
            _check_cuts(prefix, manifests.values())
            if os.path.lexists(manifest_path(prefix)):
                return _check_merged(prefix, manifests.values())
            for name in (f"{prefix}.bin", f"{prefix}.partial"):
                if os.path.lexists(name):
                    raise UserError(
                        f"{format_path(Path(name))} belongs to a preparation without parts; "
                        "finish it, or delete it to merge the parts"
                    )
            for place, manifest in manifests.items():
                check_sizes(place, manifest)
            return _write(prefix, manifests, show_progress)
    except ValidationError:  # The sum of damaged counts may exceed the limits of Manifest's fields.
        raise UserError(
            f"the manifests in {format_path(parts_folder(prefix))} are damaged: the sums of their "
            "counts are too large; copy them again, or prepare the parts again"
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot write {format_path(Path(error.filename or prefix))}: {os_error_text(error)}; "
            "correct that and run the same command again"
        ) from None


def _complete(prefix: Path) -> list[Part]:
    """Return all parts in order; refuse the merge if a part is missing or unfinished."""
    found, folder = find_parts(prefix), format_path(parts_folder(prefix))
    if not found:
        raise UserError(
            f"{folder} holds no part; write parts with 'diffmegatron prepare INPUT --output "
            f"{format_path(prefix)} --part 1/8' and so on"
        )
    whole = [Part(number, found[0].of) for number in range(1, found[0].of + 1)]
    unfinished = [
        part
        for part in whole
        if not os.path.lexists(manifest_path(place := part.prefix(prefix)))
        or os.path.lexists(f"{place}.partial")
    ]
    missing = [part for part in whole if part not in found]
    for problem, parts in (("missing", missing), ("unfinished", unfinished)):
        if parts:
            listed = ", ".join(map(str, parts[:_LISTED])) + (", ..." if parts[_LISTED:] else "")
            raise UserError(
                f"{folder} is not complete: {listed} {'is' if len(parts) == 1 else 'are'} "
                f"{problem}; run 'diffmegatron prepare' with --part {parts[0]}"
                f"{' and so on' if parts[1:] else ''} first"
            )
    return whole


def _read(prefix: Path, part: Part) -> CorpusManifest:
    manifest = read_corpus_manifest(part.prefix(prefix))
    recorded = manifest.part
    if recorded is None or (recorded.number, recorded.of) != (part.number, part.of):
        path = format_path(manifest_path(part.prefix(prefix)))
        what = f"part {recorded.number}/{recorded.of}" if recorded else "a whole corpus"
        raise UserError(
            f"{path} is the manifest of {what}, not of part {part}; delete it, and run "
            f"'diffmegatron prepare' with --part {part}"
        )
    return manifest


def _check_alike(parts: Sequence[Part], manifests: Mapping[Path, CorpusManifest]) -> None:
    first = next(iter(manifests.values()))
    for part, (place, manifest) in zip(parts, manifests.items(), strict=True):
        if first.part and (problem := _difference(manifest, first.settings, first.part)):
            raise UserError(
                f"part {part} was prepared {problem}, unlike part {parts[0]}; delete "
                f"{format_path(place)}.* and prepare it like part {parts[0]}"
            )


def _check_cuts(prefix: Path, manifests: Iterable[CorpusManifest]) -> None:
    """Check that each range of a divided file begins where the previous part's range ends.

    If a file was changed between the preparations of its parts, its cuts may have moved.
    """
    expected: tuple[str, int] | None = None
    for record in (record for manifest in manifests for record in manifest.inputs):
        begins = (record.path, record.before) if record.before else None
        if begins != expected:
            break
        expected = (record.path, record.before + record.bytes) if record.after else None
    else:
        if expected is None:
            return
    path = (begins or expected or ("",))[0]
    raise UserError(
        f"input file {shorten(path)} was changed between the parts of {format_path(prefix)} that "
        "read it: one does not begin where another ends; delete these parts and prepare them again"
    )


def _check_merged(prefix: Path, manifests: Iterable[CorpusManifest]) -> CorpusManifest:
    path = format_path(manifest_path(prefix))
    if read_corpus_manifest(prefix).parts != tuple(manifest.outputs[0] for manifest in manifests):
        raise UserError(f"{path} was merged from other parts; delete it to merge these")
    try:
        return check_hashes(prefix)
    except UserError as damage:
        raise UserError(f"{damage} (or delete {path} and merge again)") from None


def _write(
    prefix: Path, parts: Mapping[Path, CorpusManifest], show_progress: bool
) -> CorpusManifest:
    manifests = list(parts.values())
    if not any(manifest.documents for manifest in manifests):
        raise UserError(
            f"the {len(manifests)} parts in {format_path(parts_folder(prefix))} hold no document "
            "with text; check the input and its layout"
        )
    sha256 = _hash_tokens(parts, show_progress)
    index = Path(f"{prefix}.idx")
    merge_indexes(index, [Path(f"{place}.idx") for place in parts])
    records = tuple(manifest.outputs[0] for manifest in manifests)
    size, tokens = sum(record.bytes for record in records), printable(f"{prefix.name}.bin")
    merged = CorpusManifest(
        tokenizer=manifests[0].tokenizer,
        settings=manifests[0].settings,
        **{name: sum(getattr(manifest, name) for manifest in manifests) for name in _COUNTS},
        lengths=_lengths(manifests),
        inputs=tuple(record for manifest in manifests for record in manifest.inputs),
        outputs=(
            FileRecord(path=tokens, bytes=size, sha256=sha256),
            file_record(index, index.name),
        ),
        parts=records,
    ).sealed()
    write_durably(manifest_path(prefix), merged.to_json().encode())
    return merged


def _lengths(manifests: Iterable[CorpusManifest]) -> tuple[LengthBin, ...]:
    documents, tokens = Counter[int](), Counter[int]()
    for part in (part for manifest in manifests for part in manifest.lengths):
        documents[part.at_least.bit_length() - 1] += part.documents
        tokens[part.at_least.bit_length() - 1] += part.tokens
    return tuple(
        LengthBin(at_least=1 << n, documents=documents[n], tokens=tokens[n])
        for n in range(min(documents, default=0), max(documents, default=-1) + 1)
    )


def _hash_tokens(parts: Mapping[Path, CorpusManifest], show_progress: bool) -> str:
    """Verify the files of each part, and return the sha256 of the concatenated token files.

    Each token file is read once; two threads compute its own hash and the hash of all tokens.
    """
    whole, console, items = hashlib.sha256(), Console(stderr=True), list(parts.items())
    with ThreadPoolExecutor(1) as other_core:
        for prefix, manifest in track(items, "merge", console=console, disable=not show_progress):
            list(check_hash(prefix, ".idx"))
            own, path = hashlib.sha256(), Path(f"{prefix}.bin")
            for piece in pieces(path):
                pending = other_core.submit(whole.update, piece)
                own.update(piece)
                pending.result()
            if own.hexdigest() != manifest.outputs[0].sha256:
                raise UserError(
                    f"{format_path(path)} is damaged: its sha256 is not that of "
                    f"{format_path(manifest_path(prefix))}; prepare this part again with --restart"
                )
    return whole.hexdigest()
