"""Append-only files with commits, so that the progress of a preparation survives a kill."""

import hashlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Self

from pydantic import BaseModel, Field

from diffmegatron.data.index.corpus_manifest import PartRecord
from diffmegatron.data.prepare.worker_pool import CorpusPosition
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_sealed, write_sealed
from diffmegatron.section import Section

_STATE = "journal.json"
_BUFFER = 1 << 24


@dataclass
class Counts:
    """Running totals of a preparation."""

    documents: int = 0  # without duplicates
    tokens: int = 0  # without duplicates, with end-of-document tokens
    text_bytes: int = 0  # UTF-8 bytes of the encoded text, with duplicates
    rejected: int = 0
    empty: int = 0
    duplicates: int = 0


class PreparationIdentity(Section):
    """Inputs and settings of a preparation; they must be unchanged to resume it."""

    settings: dict[str, str | bool | int | None]
    files: tuple[tuple[str, int, int], ...]  # path, bytes to read and modification time (ns)
    part: PartRecord | None = None  # None: the whole corpus


class JournalState(Section, frozen=False):
    """Progress of a preparation, which each commit of the journal records."""

    identity: PreparationIdentity
    position: CorpusPosition = CorpusPosition()
    counts: Counts = Field(default_factory=Counts)
    first_reject: str = ""  # description of the first unusable record
    finished: bool = False  # whether all files are complete and can be renamed


class FileState(BaseModel):
    """Number of committed bytes of a file, and their hash."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Commit(BaseModel):
    """Last commit of a journal."""

    state: JournalState
    files: dict[str, FileState]


def last_commit(folder: Path) -> Commit | None:
    """Return the last commit in the folder of a journal; None if there is no commit."""
    path = folder / _STATE
    if not os.path.lexists(path):
        return None
    commit: Commit = read_sealed(path, Commit)
    return commit


class Journal:
    """Folder of append-only files, with a file that records the last commit.

    The constructor verifies the committed bytes of every file and removes the bytes after them.
    Without a commit, it empties all files.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], commit: Commit | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._digests = {name: hashlib.sha256() for name in names}
        nothing = FileState(bytes=0, sha256=hashlib.sha256().hexdigest())
        try:
            for name in names:
                self._files[name] = _open(folder / name)
                committed = commit.files.get(name) if commit else nothing
                if committed is None or not self._resume(name, committed):
                    raise UserError(f"{format_path(folder / name)} differs from what was committed")
        except BaseException:
            self.close()
            raise

    def _resume(self, name: str, committed: FileState) -> bool:
        """Truncate a file to its committed bytes; return False if these bytes have changed."""
        file, digest, left = self._files[name], self._digests[name], committed.bytes
        while left and (part := file.read(min(left, _BUFFER))):
            digest.update(part)
            left -= len(part)
        if left or digest.hexdigest() != committed.sha256:
            return False
        file.truncate(committed.bytes)
        file.seek(committed.bytes)
        return True

    def append(self, name: str, content: bytes | memoryview) -> None:
        """Append bytes to the file ``name``."""
        self._files[name].write(content)
        self._digests[name].update(content)

    def sha256(self, name: str) -> str:
        """Return the sha256 of all bytes of the file ``name``, committed or not."""
        return self._digests[name].hexdigest()

    def commit(self, state: JournalState) -> None:
        """Write ``state`` and all appended data durably."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        files = {
            name: FileState(bytes=file.tell(), sha256=self.sha256(name))
            for name, file in self._files.items()
        }
        content = Commit(state=state, files=files).model_dump_json()
        write_sealed(self.folder / _STATE, content)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(path: Path) -> BinaryIO:
    # Without O_NONBLOCK, opening a device could block forever.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{format_path(path)} is not a regular file")
    return os.fdopen(descriptor, "r+b")


def remove_journal(folder: Path) -> None:
    """Delete a journal's folder, the commit last, so that a killed deletion can be repeated."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _STATE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    folder.rmdir()
