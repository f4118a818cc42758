"""The folder of a run's checkpoints.

A checkpoint is written under a temporary name, and renamed to ``step_XXXXXXXX`` when all its files
are on the disk. An interrupted save therefore leaves no incomplete ``step_XXXXXXXX``.
"""

import errno
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_manifest import STEP_NAME, read_checkpoint_manifest
from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path, os_error_text, sync_path

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
# Name of the resolved recipe, both in a run_dir and in each checkpoint.
RECIPE = "recipe.yaml"
_UNFINISHED = ".unfinished"
_REMOVED = ".removed"
_LEFT = ".left"


class CheckpointStore:
    """The folder ``run_dir/checkpoints``."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / CHECKPOINTS

    def path(self, step: int) -> Path:
        """Return the final path of a step's checkpoint."""
        return self.directory / f"step_{step:08d}"

    def unfinished_path(self, step: int) -> Path:
        """Return the path of a step's checkpoint while it is being written."""
        return self.directory / f"step_{step:08d}{_UNFINISHED}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, including damaged ones, in ascending order."""
        try:
            names = [path.name for path in self.directory.iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot read {format_path(self.directory)}: {os_error_text(error)}"
            ) from None
        found = (STEP_NAME.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def complete(self) -> list[int]:
        """Return the ascending steps of complete checkpoints; log a warning for each damaged one.

        A checkpoint is complete if its files have the names and sizes in its manifest.
        """
        found = []
        for step in self.steps():
            try:
                read_checkpoint_manifest(self.path(step))
            except UserError as error:
                log.warning("skipped a damaged checkpoint: %s", error)
                continue
            found.append(step)
        return found

    def latest(self) -> Path | None:
        """Return the path of the newest complete checkpoint, or None if there is none."""
        complete = self.complete()
        return self.path(complete[-1]) if complete else None

    def begin(self, step: int) -> Path:
        """Create a directory for a new save; delete remains of interrupted saves and removals."""
        unfinished = self.unfinished_path(step)
        with explain_os_errors(f"cannot write checkpoints in {format_path(self.directory)}"):
            for suffix in (_UNFINISHED, _REMOVED):
                for path in self.directory.glob(f"step_*{suffix}"):
                    shutil.rmtree(path)
            unfinished.mkdir(parents=True)
        return unfinished

    def commit(self, step: int) -> Path:
        """Flush a written checkpoint to disk and rename it; delete an older save of this step."""
        unfinished, final = self.unfinished_path(step), self.path(step)
        for path in (*unfinished.iterdir(), unfinished):
            sync_path(path)
        replaced = self._rename(step, _REMOVED) if final.exists() else None
        unfinished.rename(final)
        sync_path(self.directory)
        if replaced is not None:
            shutil.rmtree(replaced)
        return final

    def abandon(self, step: int) -> None:
        """Remove the unfinished directory of a save that failed."""
        shutil.rmtree(self.unfinished_path(step), ignore_errors=True)

    def remove(self, step: int) -> None:
        """Rename a checkpoint so that no reader finds it, then delete its files.

        If its directory is not writable, raise OSError and leave the checkpoint unchanged.
        """
        path = self.path(step)
        # The rename would succeed without this permission, but the deletion of the files would not.
        if not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        shutil.rmtree(self._rename(step, _REMOVED))

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint so that :meth:`steps` does not list it; return the new path."""
        return self._rename(step, _LEFT)

    def _rename(self, step: int, suffix: str) -> Path:
        renamed = self.directory / f"step_{step:08d}{suffix}"
        shutil.rmtree(renamed, ignore_errors=True)
        return self.path(step).rename(renamed)


def prunable(steps: Sequence[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Return the steps to remove; the ``keep_last`` newest and multiples of ``keep_every`` stay."""
    return [step for step in steps[:-keep_last] if keep_every is None or step % keep_every]
