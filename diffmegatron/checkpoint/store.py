"""The checkpoints of a run: complete directories ``step_XXXXXXXX``, or nothing."""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diffmegatron.checkpoint.manifest import read_manifest, verify_files
from diffmegatron.errors import UserError

log = logging.getLogger(__name__)

_NAME = re.compile(r"step_(\d{8})")
_UNFINISHED = ".unfinished"


class CheckpointStore:
    """``run_dir/checkpoints``: what is complete there, and how a new one becomes so."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "checkpoints"

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or will be."""
        return self.directory / f"step_{step:08d}"

    def unfinished_path(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it counts."""
        return self.directory / f"step_{step:08d}{_UNFINISHED}"

    def steps(self) -> list[int]:
        """Steps that have a finished directory, ascending."""
        if not self.directory.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are all there; damaged ones are reported, not used."""
        for step in reversed(self.steps()):
            path = self.path(step)
            try:
                verify_files(path, read_manifest(path), checksums=False)
            except UserError as error:
                log.warning("checkpoint passed over: %s", error)
                continue
            return path
        return None

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of a step into.

        Raises:
            UserError: the directory cannot be made.
        """
        unfinished = self.unfinished_path(step)
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        except OSError as error:
            raise UserError(
                f"cannot write checkpoints in {self.directory}: {error.strerror}"
            ) from None
        return unfinished

    def commit(self, step: int) -> Path:
        """Make the written directory count: flush it, put it in place of any older one."""
        unfinished, final = self.unfinished_path(step), self.path(step)
        for path in (*unfinished.iterdir(), unfinished):
            with _opened(path) as descriptor:
                os.fsync(descriptor)
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        with _opened(self.directory) as descriptor:
            os.fsync(descriptor)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.unfinished_path(step), ignore_errors=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
