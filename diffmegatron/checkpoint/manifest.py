"""What a complete checkpoint consists of: every file with its size and checksum.

The manifest is written last. A directory without one, or whose files differ from it, does not
count as a checkpoint.

Sizes are compared whenever checkpoints are listed; they show a file that is missing or cut short.
Checksums, which alone show a flipped byte, need every byte read: a run compares them before it goes
on from a checkpoint (each rank its share of the files, which the loading that follows then finds
in the page cache), ``diffmegatron checkpoint verify`` at any time.
"""

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from diffmegatron.errors import UserError

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step_(\d{8})")
FORMAT = 1
_CHUNK = 1 << 22
_LISTED = 5


@dataclass(frozen=True)
class FileEntry:
    """One file: its plain name, size in bytes and CRC-32."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and the step it was taken at."""

    step: int
    files: tuple[FileEntry, ...]
    format: int = FORMAT


def describe_file(path: Path) -> FileEntry:
    """Read a file once for its entry."""
    checksum, size = 0, 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
    return FileEntry(path.name, size, checksum)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` into a directory whose other files are all there."""
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        UserError: there is none, it cannot be parsed, it is of another format or step, or it
            names a file outside the directory.
    """
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text())
        files = tuple(FileEntry(**entry) for entry in values["files"])
        manifest = Manifest(int(values["step"]), files, int(values["format"]))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_no_checkpoint(directory)) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}; use another checkpoint") from None
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named[1]) != manifest.step:
        raise UserError(f"{path} is of step {manifest.step}, not of {directory.name}")
    if manifest.format != FORMAT:
        raise UserError(f"{path} has format {manifest.format}; this version reads format {FORMAT}")
    for entry in manifest.files:
        if Path(entry.name).name != entry.name:
            raise UserError(f"{path} names {entry.name!r}, which is not a plain file name")
    return manifest


def _no_checkpoint(directory: Path) -> str:
    """What a path is that is no checkpoint, and where there are some."""
    kind = "it is a file" if directory.is_file() else f"it has no {MANIFEST}"
    if not directory.exists():
        kind = "it does not exist"
    for folder in (directory / "checkpoints", directory, directory.parent):
        steps = sorted(
            path.name for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name)
        )
        if steps:
            listed = f"{', '.join(steps[-_LISTED:])}{' and older' if len(steps) > _LISTED else ''}"
            return f"{directory} is not a checkpoint: {kind}; {folder} has {listed}"
    return (
        f"{directory} is not a checkpoint: {kind}; give a directory such as "
        "runs/NAME/checkpoints/step_00001000"
    )


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Compare the files with the manifest by their sizes.

    Raises:
        UserError: a file is missing, has another size, or is a link.
    """
    for entry in manifest.files:
        path = directory / entry.name
        if path.is_symlink():
            raise UserError(f"{path} is a link; the files of a checkpoint lie in its directory")
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise UserError(f"{path} {found}; the checkpoint's manifest says {entry.size} bytes")


def verify_contents(directory: Path, entries: Iterable[FileEntry]) -> None:
    """Read files whole and compare them with the manifest's checksums.

    Raises:
        UserError: a file is damaged or cannot be read.
    """
    for entry in entries:
        path = directory / entry.name
        try:
            found = describe_file(path)
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if found != entry:
            raise UserError(f"{path} is damaged: its checksum is not the manifest's")
