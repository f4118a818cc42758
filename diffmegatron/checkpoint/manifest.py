"""What a complete checkpoint consists of: every file with its size and checksum.

The manifest is written last. A directory without one, or whose files differ from it, does not
count as a checkpoint.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from diffmegatron.errors import UserError

MANIFEST = "manifest.json"
FORMAT = 1
_CHUNK = 1 << 22


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
        UserError: there is none, it cannot be parsed, it is of another format, or it names a
            file outside the directory.
    """
    path = directory / MANIFEST
    try:
        values = json.loads(path.read_text())
        files = tuple(FileEntry(**entry) for entry in values["files"])
        manifest = Manifest(int(values["step"]), files, int(values["format"]))
    except FileNotFoundError:
        raise UserError(
            f"{directory} is not a checkpoint: it has no {MANIFEST}; give a directory such as "
            "runs/NAME/checkpoints/step_00001000"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}; use another checkpoint") from None
    if manifest.format != FORMAT:
        raise UserError(f"{path} has format {manifest.format}; this version reads format {FORMAT}")
    for entry in manifest.files:
        if Path(entry.name).name != entry.name:
            raise UserError(f"{path} names {entry.name!r}, which is not a plain file name")
    return manifest


def verify_files(directory: Path, manifest: Manifest, *, checksums: bool) -> None:
    """Compare the files with the manifest: their sizes, and their contents if asked.

    Raises:
        UserError: a file is missing or differs.
    """
    for entry in manifest.files:
        path = directory / entry.name
        size = path.stat().st_size if path.is_file() else None
        if size != entry.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise UserError(f"{path} {found}; the checkpoint's manifest says {entry.size} bytes")
        if checksums and describe_file(path).crc32 != entry.crc32:
            raise UserError(f"{path} is damaged: its checksum is not the manifest's")
