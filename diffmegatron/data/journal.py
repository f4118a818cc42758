"""Append-only files with a commit point: what was committed survives a kill at any moment."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from diffmegatron.errors import UserError

_STATE = "journal.json"


class Journal:
    """A folder of files that only grow, and a state that says how long each one validly is.

    Opening it cuts every file back to its committed length, so bytes written after the last
    commit are as if never written.

    Raises:
        UserError: a file is shorter than what was committed.
    """

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        sizes = _read(folder).get("sizes", {})
        self._files: dict[str, BinaryIO] = {}
        for name in names:
            file = self._files[name] = (folder / name).open("ab")
            committed, found = sizes.get(name, 0), file.tell()
            if found < committed:
                raise UserError(
                    f"{folder / name} has {found} bytes, but {committed} were committed; delete "
                    f"{folder} and start again"
                )
            file.truncate(committed)
            file.seek(committed)

    def append(self, name: str, content: bytes | memoryview) -> None:
        """Append to one of the files."""
        self._files[name].write(content)

    def commit(self, state: dict[str, Any]) -> None:
        """Make everything appended so far, and ``state`` (JSON-able), survive."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        content = json.dumps({"state": state, "sizes": sizes})
        replace_durably(self.folder / _STATE, content.encode())

    def close(self) -> None:
        """Close the files; what was not committed is lost at the next opening."""
        for file in self._files.values():
            file.close()


def committed_state(folder: Path) -> dict[str, Any] | None:
    """What the last commit in ``folder`` was given; None where there was none."""
    return _read(folder).get("state")


def remove_journal(folder: Path) -> None:
    """Delete the folder, the state last: a kill on the way leaves a journal that still reads."""
    for path in folder.iterdir():
        if path.name != _STATE:
            path.unlink()
    (folder / _STATE).unlink(missing_ok=True)
    folder.rmdir()


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a neighbour is written, synced and renamed over it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / _STATE
    return json.loads(path.read_text()) if path.exists() else {}
