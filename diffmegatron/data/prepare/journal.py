"""Append-only files with a commit point: what was committed survives a kill at any moment."""

import hashlib
import os
import shutil
import stat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Generic, Self, TypeVar

from pydantic import BaseModel, Field

from diffmegatron.data.index.sealed_json import read_sealed, write_sealed
from diffmegatron.errors import UserError
from diffmegatron.files import shown

_STATE = "journal.json"
_BUFFER = 1 << 24

State = TypeVar("State", bound=BaseModel)


class FileState(BaseModel):
    """How long a file validly is, and the sha256 of that much of it."""

    bytes: Annotated[int, Field(ge=0)]
    sha256: str


class Commit(BaseModel, Generic[State]):
    """What a commit makes survive: a state, and what the files then hold."""

    state: State
    files: dict[str, FileState]


def last_commit(folder: Path, schema: type[State]) -> Commit[State] | None:
    """The last commit in ``folder``; None where there was none.

    Raises:
        UserError: it cannot be read, or was changed since.
    """
    path = folder / _STATE
    if not os.path.lexists(path):
        return None
    commit: Commit[State] = read_sealed(path, Commit[schema])  # type: ignore[valid-type]
    return commit


class Journal:
    """A folder of files that only grow, and a state that says how long each one validly is.

    Opening it cuts every file back to its committed length, so bytes written after the last
    commit are as if never written. What was committed is read once and compared to its hash.
    It is a context, which closes the files; what was not committed is lost at the next opening.

    Args:
        folder: made where it is missing.
        names: of the files.
        commit: of :func:`last_commit`; None starts over.

    Raises:
        UserError: a file is no ordinary file, or not what was committed.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], commit: Commit[Any] | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._digests = {name: hashlib.sha256() for name in names}
        nothing = FileState(bytes=0, sha256=hashlib.sha256().hexdigest())
        try:
            for name in names:
                self._files[name] = _open(folder / name)
                committed = commit.files.get(name) if commit else nothing
                if committed is None or not self._goes_on_from(name, committed):
                    raise UserError(f"{shown(folder / name)} is not what was committed")
        except BaseException:
            self.close()
            raise

    def _goes_on_from(self, name: str, committed: FileState) -> bool:
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
        """Append to one of the files."""
        self._files[name].write(content)
        self._digests[name].update(content)

    def sha256(self, name: str) -> str:
        """Hash of all that is in one of the files."""
        return self._digests[name].hexdigest()

    def commit(self, state: BaseModel) -> None:
        """Make everything appended so far, and ``state``, survive."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        files = {
            name: FileState(bytes=file.tell(), sha256=self.sha256(name))
            for name, file in self._files.items()
        }
        content = Commit[BaseModel](state=state, files=files).model_dump_json(serialize_as_any=True)
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
    # Without O_NONBLOCK the opening of a FIFO could wait forever.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{shown(path)} is no ordinary file")
    return os.fdopen(descriptor, "r+b")


def remove_journal(folder: Path) -> None:
    """Delete the folder, the state last: a kill on the way leaves a journal that still reads."""
    for path in folder.iterdir():
        if path.name != _STATE:
            _remove(path)
    if os.path.lexists(folder / _STATE):
        _remove(folder / _STATE)
    folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
