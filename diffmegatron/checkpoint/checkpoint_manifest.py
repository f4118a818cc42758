"""The manifest of a checkpoint, written last: name, size and checksum of all other files."""

import json
import re
import stat
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path, os_error_text, read_json, shorten
from diffmegatron.section import CountOrZero

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step_(\d{8})")
FORMAT = 1
MAX_STEP = 99_999_999
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_BUFFER = 1 << 22
_LISTED = 5


def _check_plain(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{shorten(name)!r} is not a plain file name")
    return name


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint: its name without folders, size in bytes and CRC-32."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, AfterValidator(_check_plain)]
    size: CountOrZero
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


@dataclass(frozen=True)
class CheckpointManifest:
    """The files and the step of a checkpoint."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    files: tuple[FileEntry, ...]
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Total size of all files in bytes."""
        return sum(entry.size for entry in self.files)


def describe_file(path: Path) -> FileEntry:
    """Read a file and return its manifest entry."""
    checksum, size = 0, 0
    with path.open("rb") as stream:
        while block := stream.read(_BUFFER):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return FileEntry(path.name, size, checksum)


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Write ``manifest.json`` into a directory that already has all other files."""
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def read_checkpoint_manifest(directory: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint; check the names and sizes of the files against it."""
    path = directory / MANIFEST
    if _size(path) is None:
        raise UserError(_no_checkpoint(directory))
    manifest: CheckpointManifest = read_json(path, CheckpointManifest)
    named = STEP_NAME.fullmatch(directory.name)
    if named and int(named[1]) != manifest.step:
        raise UserError(f"{format_path(path)} is of step {manifest.step}, not of {directory.name}")
    if manifest.format != FORMAT:
        raise UserError(
            f"{format_path(path)} has format {manifest.format}; this version reads format {FORMAT}"
        )
    _check_files(directory, manifest)
    return manifest


def _check_files(directory: Path, manifest: CheckpointManifest) -> None:
    listed = {MANIFEST}
    for entry in manifest.files:
        path = directory / entry.name
        if entry.name in listed:
            raise UserError(
                f"{format_path(directory / MANIFEST)} lists {entry.name} more than once"
            )
        listed.add(entry.name)
        size = _size(path)
        if size != entry.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise UserError(
                f"{format_path(path)} {found}; the checkpoint's manifest lists {entry.size} bytes"
            )
    # A run may remove this checkpoint at the same time.
    with explain_os_errors(f"cannot read {format_path(directory)}"):
        paths = sorted(directory.iterdir())
    for path in paths:
        if path.name not in listed:
            raise UserError(
                f"{format_path(path)} is not in the checkpoint's manifest; move it away"
            )


def _size(path: Path) -> int | None:
    """Return the size of an ordinary file in bytes; None if it does not exist."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {format_path(path)}: {os_error_text(error)}") from None
    if stat.S_ISLNK(status.st_mode):
        raise UserError(f"{format_path(path)} is a link; replace it by the file itself")
    if not stat.S_ISREG(status.st_mode):
        raise UserError(
            f"{format_path(path)} is not an ordinary file; a checkpoint has only such files"
        )
    return status.st_size


def _no_checkpoint(directory: Path) -> str:
    """Return the error message for a path that is not a checkpoint; list checkpoints nearby."""
    kind = "it is a file" if directory.is_file() else f"it has no {MANIFEST}"
    if not directory.exists():
        kind = "it does not exist"
    for folder in (directory / "checkpoints", directory, directory.parent):
        steps = sorted(
            path.name for path in folder.glob("step_*") if STEP_NAME.fullmatch(path.name)
        )
        if steps:
            listed = f"{', '.join(steps[-_LISTED:])}{' and older' if len(steps) > _LISTED else ''}"
            return (
                f"{format_path(directory)} is not a checkpoint: {kind}; "
                f"{format_path(folder)} has {listed}"
            )
    return (
        f"{format_path(directory)} is not a checkpoint: {kind}; give a directory such as "
        "runs/NAME/checkpoints/step_00001000"
    )
