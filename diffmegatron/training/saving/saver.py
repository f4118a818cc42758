"""Asynchronous saves: the run waits for a copy into host memory, and a thread writes the copy.

A save becomes a checkpoint when every rank has written its file, a later step has shown the weights
to be sound, and rank 0 has renamed the directory. This happens at the first step with finite loss
and gradient norm at which no rank writes any more; the ranks exchange that flag in the all-reduce
of :mod:`~diffmegatron.training.compute.agreement`. Weights that an update broke lead to a step that
is not finite, so a run never rolls back to them.
"""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from diffmegatron.checkpoint.checkpoint_format import Position, finish_checkpoint, rank_file
from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore, prunable
from diffmegatron.checkpoint.sharded import write_pieces
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import HeldFolder, shown
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.parallel.parallel_state import ParallelState, fail_together
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.saving.save_time import save_warnings
from diffmegatron.training.saving.snapshot import HostCopy, ParameterShards

log = logging.getLogger(__name__)

# Number of immediate retries of a failed save; then the next interval tries again.
_RETRIES = 2


class Saver:
    """One rank's part in the saves of a run; all ranks call the same methods.

    Args:
        store: checkpoints of the run.
        engine: optimizer to save.
        shards: shards of its parameters.
        recipe: recipe of the run.
        parallel_state: layout, and this rank's place in it.
        launch: environment of this rank, with Slurm's time limits.
        saved_step: step of the checkpoint that the run resumes from; None for a new run.
        run_dir: directory in which the run began, on rank 0; None on the others.

    Attributes:
        saved_step: step of the newest checkpoint; None if there is none.
    """

    def __init__(
        self,
        store: CheckpointStore,
        engine: ZeroEngine,
        shards: ParameterShards,
        recipe: Recipe,
        parallel_state: ParallelState,
        launch: LaunchEnvironment,
        saved_step: int | None,
        run_dir: HeldFolder | None,
    ) -> None:
        self.saved_step = saved_step
        self._store, self._engine, self._shards, self._run_dir = store, engine, shards, run_dir
        self._recipe, self._parallel_state, self._launch = recipe, parallel_state, launch
        self._copy = HostCopy()
        self._write: _Write | None = None
        self._pruning: threading.Thread | None = None
        self._position: Position | None = None
        self._sound = False
        self._started = self._stalled = 0.0
        self._failed = self._failed_in_a_row = 0
        self._problem = ""
        self._warned: set[str] = set()

    @property
    def is_writing(self) -> bool:
        """True while this rank's thread writes."""
        return self._write is not None and self._write.is_alive()

    @property
    def is_open(self) -> bool:
        """True from the start of a save until it is complete or has failed."""
        return self._position is not None

    def step_decided(self, *, finite: bool) -> None:
        """Note whether a step was finite, with the weights of the open save or later ones."""
        self._sound = self._sound or finite

    @property
    def is_ready(self) -> bool:
        """True if the open save becomes a checkpoint as soon as all ranks have written."""
        return self.is_open and self._sound

    @property
    def should_retry(self) -> bool:
        """True if the last save failed and should be tried again."""
        return not self.is_open and 0 < self._failed_in_a_row <= _RETRIES

    def start(self, position: Position) -> dict[str, float]:
        """Begin to save, and return metrics only if that fails.

        Raises:
            UserError: If ``run_dir`` was moved or removed. A new folder of that name would have
                neither the earlier checkpoints nor the lock.
        """
        assert not self.is_open
        self._all(self._check_run_dir, position.step, only=self._run_dir is not None)
        self._started = time.perf_counter()
        self._position, self._sound = position, False
        try:
            self._all(self._store.begin, position.step, only=self._parallel_state.is_main)
            self._copy.take(self._engine, self._shards)
        except UserError as error:
            return self._fail(position, str(error))
        path = self._store.unfinished_path(position.step) / rank_file(self._parallel_state.rank)
        self._write = _Write(path, self._copy)
        self._write.start()
        self._stalled = time.perf_counter() - self._started
        return {}

    def wait(self) -> None:
        """Wait for this rank's threads."""
        for thread in (self._write, self._pruning):
            if thread is not None:
                thread.join()

    def close(self) -> dict[str, float]:
        """Complete the open save if its weights are known to be sound, or else drop it."""
        if not self.is_open:
            return {}
        if self._sound:
            return self.settle()
        position = self._position
        assert position is not None
        self.wait()
        fail_together(None)  # Other ranks may still write into the directory.
        if self._parallel_state.is_main:
            self._store.abandon(position.step)
            log.warning("checkpoint of step %d dropped: no later step was finite", position.step)
        self._write = self._position = None
        return {}

    def settle(self) -> dict[str, float]:
        """Wait for all ranks' threads, then complete the save or report that it failed.

        Returns:
            Metrics of the save.
        """
        position, write = self._position, self._write
        assert position is not None and write is not None
        waiting = time.perf_counter()
        write.join()
        entries: list[Any] = [None] * self._parallel_state.world_size
        try:
            fail_together(write.problem)
            distributed.all_gather_object(entries, write.entry)
            self._all(
                finish_checkpoint,
                self._store,
                position,
                self._recipe,
                entries,
                only=self._parallel_state.is_main,
            )
        except UserError as error:
            return self._fail(position, str(error))
        self._write = self._position = None
        self._failed_in_a_row = 0
        self.saved_step = position.step
        now = time.perf_counter()
        if self._parallel_state.is_main:
            say(f"saved {self._store.path(position.step)}")
            self._warn_if_slow(now - self._started)
            self._begin_pruning(position.step)
        return {
            "ckpt/stall_seconds": self._stalled + now - waiting,
            "ckpt/total_seconds": now - self._started,
            "ckpt/bytes": sum(entry.size for entry in entries),
            "ckpt/failed": self._failed,
        }

    def save_now(self, position: Position) -> dict[str, float]:
        """Save, wait for completion, and return the metrics of the save.

        Raises:
            UserError: If every try failed.
        """
        self._failed_in_a_row = 0
        while True:
            values = self.start(position)
            if self.is_open:
                values = self.settle()
            if self._failed_in_a_row == 0:
                return values
            if not self.should_retry:
                raise UserError(self._problem)

    def _check_run_dir(self, step: int) -> None:
        # If the disk fails for a moment, this save fails too and is tried again.
        if self._run_dir is not None and not self._run_dir.is_in_place():
            run_dir = self._store.directory.parent
            raise UserError(
                f"run_dir {shown(run_dir)} was moved, removed or replaced while the run was in it; "
                f"step {step} could not be saved; put it back and start the run again"
            )

    def _fail(self, position: Position, problem: str) -> dict[str, float]:
        self._write = self._position = None
        self._failed += 1
        self._failed_in_a_row += 1
        self._problem = problem
        if self._parallel_state.is_main:
            self._store.abandon(position.step)
            log.error("checkpoint of step %d failed: %s", position.step, problem)
        return {"ckpt/failed": self._failed}

    def _warn_if_slow(self, seconds: float) -> None:
        """Log each warning about Slurm's time limits once."""
        margin = self._recipe.checkpoint.time_limit_margin
        for kind, warning in save_warnings(seconds, self._launch, margin).items():
            if kind not in self._warned:
                log.warning("%s", warning)
            self._warned.add(kind)

    def _begin_pruning(self, saved_step: int) -> None:
        """Remove old checkpoints in a thread, as unlinking gigabytes takes seconds."""
        keep_last = self._recipe.checkpoint.keep_last
        if keep_last is None:
            return
        if self._pruning is not None:
            self._pruning.join()
        # The thread is not a daemon, so that the end of the process waits for it.
        self._pruning = threading.Thread(
            target=self._prune, args=(saved_step, keep_last), name="checkpoint-prune"
        )
        self._pruning.start()

    def _prune(self, saved_step: int, keep_last: int) -> None:
        try:
            # Checkpoints of later steps are damaged, or the run rolled back before them.
            steps = [step for step in self._store.complete() if step <= saved_step]
            for step in prunable(steps, keep_last, self._recipe.checkpoint.keep_every):
                self._store.remove(step)
        except OSError as error:
            log.error("cannot remove an old checkpoint: %s", error)

    def _all(self, function: Callable[..., object], *arguments: object, only: bool) -> None:
        """Call a function on this rank if ``only``, and raise on all ranks if it failed on one."""
        problem = None
        try:
            if only:
                function(*arguments)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # Any exception must end all ranks together.
            problem = f"cannot write the checkpoint in {self._store.directory}: {error}"
        fail_together(problem)


class _Write(threading.Thread):
    """A thread that writes one rank's file, and then sets either ``entry`` or ``problem``."""

    def __init__(self, path: Path, copy: HostCopy) -> None:
        super().__init__(name="checkpoint-write", daemon=True)
        self._path, self._copy = path, copy
        self.entry: FileEntry | None = None
        self.problem: str | None = None

    def run(self) -> None:
        """Write the file."""
        try:
            self.entry = write_pieces(self._path, *self._copy.tensors)
        except Exception as error:  # The main thread raises it on all ranks.
            self.problem = self._describe(error)

    def _describe(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return f"cannot write {self._path}: {error}"
        description = f"cannot write {self._path}: {error.strerror}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return description
        tensors, _ = self._copy.tensors
        needed = sum(tensor.nbytes for tensor in tensors.values())
        # The bytes written so far are freed when the save is abandoned.
        written = self._path.stat().st_size if self._path.exists() else 0
        free = shutil.disk_usage(self._path.parent).free + written
        return f"{description}; it needs {needed} bytes and its disk has {free} free"
