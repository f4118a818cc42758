"""The checkpoints of a run: complete directories ``step_XXXXXXXX``, or nothing."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_manifest import STEP_NAME, read_manifest
from diffmegatron.errors import UserError
from diffmegatron.files import reason, shown

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
# In a run_dir and in each checkpoint.
RECIPE = "recipe.yaml"
_UNFINISHED = ".unfinished"
_REMOVED = ".removed"
_LEFT = ".left"


class CheckpointStore:
    """``run_dir/checkpoints``: what is complete there, and how a new one becomes so."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / CHECKPOINTS

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or will be."""
        return self.directory / f"step_{step:08d}"

    def unfinished_path(self, step: int) -> Path:
        """Where the checkpoint of a step is written before it counts."""
        return self.directory / f"step_{step:08d}{_UNFINISHED}"

    def steps(self) -> list[int]:
        """Steps that have a finished directory, ascending.

        Raises:
            UserError: the directory is there and cannot be read.
        """
        try:
            names = [path.name for path in self.directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {shown(self.directory)}: {reason(error)}") from None
        found = (STEP_NAME.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def complete(self) -> list[int]:
        """Steps whose files are all there, ascending; damaged ones are reported and left out."""
        found = []
        for step in self.steps():
            try:
                read_manifest(self.path(step))
            except UserError as error:
                log.warning("checkpoint passed over: %s", error)
                continue
            found.append(step)
        return found

    def latest(self) -> Path | None:
        """The newest checkpoint whose files are all there; damaged ones are reported, not used."""
        complete = self.complete()
        return self.path(complete[-1]) if complete else None

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of a step into.

        What earlier saves and removals left half done is cleared away first.

        Raises:
            UserError: the directory cannot be made.
        """
        unfinished = self.unfinished_path(step)
        try:
            for suffix in (_UNFINISHED, _REMOVED):
                for path in self.directory.glob(f"step_*{suffix}"):
                    shutil.rmtree(path)
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
        replaced = self._set_aside(step) if final.exists() else None
        unfinished.rename(final)
        with _opened(self.directory) as descriptor:
            os.fsync(descriptor)
        if replaced is not None:
            shutil.rmtree(replaced)
        return final

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that failed."""
        shutil.rmtree(self.unfinished_path(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Remove a checkpoint; it stops counting before its first file goes.

        Raises:
            OSError: it cannot be removed; one whose folder is somebody else's still counts then.
        """
        path = self.path(step)
        # Its parent may be ours where it is not: it would be renamed and then stay.
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        shutil.rmtree(self._set_aside(step))

    def leave(self, step: int) -> Path:
        """Keep a checkpoint under a name that does not count: the run could not go on from it."""
        left = self.directory / f"step_{step:08d}{_LEFT}"
        shutil.rmtree(left, ignore_errors=True)
        return self.path(step).rename(left)

    def _set_aside(self, step: int) -> Path:
        aside = self.directory / f"step_{step:08d}{_REMOVED}"
        shutil.rmtree(aside, ignore_errors=True)
        return self.path(step).rename(aside)


def prunable(steps: Sequence[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Those of ascending steps whose checkpoints a retention policy does not keep.

    Args:
        steps: of complete checkpoints.
        keep_last: how many of the newest stay.
        keep_every: multiples of this step are never removed; None: no others are kept.
    """
    return [step for step in steps[:-keep_last] if keep_every is None or step % keep_every]


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
