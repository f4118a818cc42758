"""``diffmegatron data merge``: form one corpus from the parts that ``prepare --part`` wrote.

Only ``PREFIX.idx`` and ``PREFIX.json`` are written; the tokens stay in ``PREFIX.parts``. The index
equals that of a single ``prepare``, except that duplicates are found only within parts.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.progress import track

from diffmegatron.data.index.corpus_manifest import (
    FileRecord,
    LengthBin,
    Manifest,
    check_hash,
    check_hashes,
    check_sizes,
    file_record,
    manifest_path,
    parts_folder,
    pieces,
    read_manifest,
)
from diffmegatron.data.index.index_file import merge_indexes
from diffmegatron.data.prepare.parts import Part, difference, find_parts
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import format_path, os_error_text, printable, shorten, write_durably

_LISTED = 8
_COUNTS = ("documents", "tokens", "text_bytes", "rejected", "empty", "duplicates")


def merge(prefix: Path, *, show_progress: bool = True) -> Manifest:
    """Merge the parts of a corpus; if they are merged already, verify the merged corpus."""
    place = f"the parts of {format_path(prefix)}"
    try:
        with FileLock(Path(f"{prefix}.lock"), place, "merge others"):
            parts = _complete(prefix)
            manifests = [_read(prefix, part) for part in parts]
            _check_alike(prefix, parts, manifests)
            _check_cuts(prefix, manifests)
            if os.path.lexists(manifest_path(prefix)):
                return _check_merged(prefix, manifests)
            for name in (f"{prefix}.bin", f"{prefix}.partial"):
                if os.path.lexists(name):
                    raise UserError(
                        f"{format_path(Path(name))} belongs to a preparation without parts; "
                        "finish it, or delete it to merge the parts"
                    )
            prefixes = [part.prefix(prefix) for part in parts]
            for part, manifest in zip(prefixes, manifests, strict=True):
                check_sizes(part, manifest)
            return _write(prefix, prefixes, manifests, show_progress)
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


def _read(prefix: Path, part: Part) -> Manifest:
    manifest = read_manifest(part.prefix(prefix))
    recorded = manifest.part
    if recorded is None or (recorded.number, recorded.of) != (part.number, part.of):
        path = format_path(manifest_path(part.prefix(prefix)))
        what = f"part {recorded.number}/{recorded.of}" if recorded else "a whole corpus"
        raise UserError(
            f"{path} is the manifest of {what}, not of part {part}; delete it, and run "
            f"'diffmegatron prepare' with --part {part}"
        )
    return manifest


def _check_alike(prefix: Path, parts: Sequence[Part], manifests: Sequence[Manifest]) -> None:
    first = manifests[0]
    for part, manifest in zip(parts, manifests, strict=True):
        if first.part and (problem := difference(manifest, first.settings, first.part)):
            name = f"{format_path(part.prefix(prefix))}.*"
            raise UserError(
                f"part {part} was prepared {problem}, unlike part {parts[0]}; delete {name} and "
                f"prepare it like part {parts[0]}"
            )


def _check_cuts(prefix: Path, manifests: Sequence[Manifest]) -> None:
    """Check that no divided input file was changed between the preparations of its parts."""
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


def _check_merged(prefix: Path, manifests: Sequence[Manifest]) -> Manifest:
    path = format_path(manifest_path(prefix))
    if read_manifest(prefix).parts != tuple(map(_record, manifests)):
        raise UserError(f"{path} was merged from other parts; delete it to merge these")
    try:
        return check_hashes(prefix)
    except UserError as damage:
        raise UserError(f"{damage} (or delete {path} and merge again)") from None


def _record(manifest: Manifest) -> FileRecord:
    return manifest.outputs[0]


def _write(
    prefix: Path, prefixes: Sequence[Path], manifests: Sequence[Manifest], show_progress: bool
) -> Manifest:
    if not any(manifest.documents for manifest in manifests):
        raise UserError(
            f"the {len(manifests)} parts in {format_path(parts_folder(prefix))} hold no document "
            "with text; check the input and its layout"
        )
    sha256 = _hash_tokens(prefixes, manifests, show_progress)
    index = Path(f"{prefix}.idx")
    merge_indexes(index, [Path(f"{part}.idx") for part in prefixes])
    records = tuple(map(_record, manifests))
    size, name = sum(record.bytes for record in records), printable(f"{prefix.name}.bin")
    merged = Manifest(
        tokenizer=manifests[0].tokenizer,
        settings=manifests[0].settings,
        **{name: sum(getattr(manifest, name) for manifest in manifests) for name in _COUNTS},
        lengths=_lengths(manifests),
        inputs=tuple(record for manifest in manifests for record in manifest.inputs),
        outputs=(
            FileRecord(path=name, bytes=size, sha256=sha256),
            file_record(index, index.name),
        ),
        parts=records,
    ).sealed()
    write_durably(manifest_path(prefix), merged.to_json().encode())
    return merged


def _lengths(manifests: Sequence[Manifest]) -> tuple[LengthBin, ...]:
    documents, tokens = Counter[int](), Counter[int]()
    for part in (part for manifest in manifests for part in manifest.lengths):
        documents[part.at_least.bit_length() - 1] += part.documents
        tokens[part.at_least.bit_length() - 1] += part.tokens
    return tuple(
        LengthBin(at_least=1 << n, documents=documents[n], tokens=tokens[n])
        for n in range(min(documents, default=0), max(documents, default=-1) + 1)
    )


def _hash_tokens(
    prefixes: Sequence[Path], manifests: Sequence[Manifest], show_progress: bool
) -> str:
    """Verify the files of each part, and return the sha256 of the concatenated token files.

    Each token file is read once; two threads compute its own hash and the hash of all tokens.
    """
    whole, console = hashlib.sha256(), Console(stderr=True)
    parts = list(zip(prefixes, manifests, strict=True))
    with ThreadPoolExecutor(1) as other_core:
        for prefix, manifest in track(parts, "merge", console=console, disable=not show_progress):
            list(check_hash(prefix, ".idx"))
            own, path = hashlib.sha256(), Path(f"{prefix}.bin")
            for piece in pieces(path):
                pending = other_core.submit(whole.update, piece)
                own.update(piece)
                pending.result()
            if own.hexdigest() != _record(manifest).sha256:
                raise UserError(
                    f"{format_path(path)} is damaged: its sha256 is not that of "
                    f"{format_path(manifest_path(prefix))}; prepare this part again with --restart"
                )
    return whole.hexdigest()
