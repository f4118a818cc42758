"""Saves while training goes on: the run waits for a copy into host memory, a thread writes it.

A save counts when every rank has written, a later step has shown its weights to be sound, and
rank 0 has renamed the directory. That is at the first step with a finite loss and gradient norm at
which the ranks agree that none writes any more (the flag travels in the all-reduce of
:mod:`~diffmegatron.training.compute.agreement`). Until then nobody is told of a checkpoint.
Weights that an update has wrecked give a step that is not finite, and are never what a run goes
back to.
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
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import ParallelState, fail_together
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.saving.save_time import save_warnings
from diffmegatron.training.saving.snapshot import HostCopy, ParameterShards

log = logging.getLogger(__name__)

# A save that failed is tried again at the next steps this often, then at the next interval.
_RETRIES = 2


class Saver:
    """One rank's part in the saves of a run. Every method is called by all ranks alike.

    Args:
        store: of the run.
        engine: the optimizer.
        shards: of its parameters.
        recipe: of the run.
        parallel_state: the ranks.
        saved_step: of the checkpoint that the run resumes from; None: it is new.
        run_dir: the folder in which the run began, on rank 0; None on the others.

    Attributes:
        saved_step: of the newest checkpoint known to count; None: there is none.
    """

    def __init__(
        self,
        store: CheckpointStore,
        engine: ZeroEngine,
        shards: ParameterShards,
        recipe: Recipe,
        parallel_state: ParallelState,
        saved_step: int | None,
        run_dir: HeldFolder | None,
    ) -> None:
        self.saved_step = saved_step
        self._store, self._engine, self._shards, self._run_dir = store, engine, shards, run_dir
        self._recipe, self._parallel_state = recipe, parallel_state
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
        """Whether this rank's thread is still at it."""
        return self._write is not None and self._write.is_alive()

    @property
    def is_open(self) -> bool:
        """Whether a save has begun whose end the ranks have not agreed on."""
        return self._position is not None

    def step_decided(self, *, finite: bool) -> None:
        """Another step is done, with the weights of the open save or later ones."""
        self._sound = self._sound or finite

    @property
    def is_ready(self) -> bool:
        """Whether the open save may count as soon as all ranks have written."""
        return self.is_open and self._sound

    @property
    def is_due_again(self) -> bool:
        """Whether the last save failed and is to be tried again."""
        return not self.is_open and 0 < self._failed_in_a_row <= _RETRIES

    def start(self, position: Position) -> dict[str, float]:
        """Begin to save; returns metrics when it has failed already.

        Raises:
            UserError: ``run_dir`` was moved or removed. A new folder of its name has none of what
                was saved, and no lock.
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
        """End the open save: make it count if its weights are known to be sound, else drop it."""
        if not self.is_open:
            return {}
        if self._sound:
            return self.settle()
        position = self._position
        assert position is not None
        self.wait()
        fail_together(None)  # the other ranks may still write into the directory
        if self._parallel_state.is_main:
            self._store.abandon(position.step)
            log.warning("checkpoint of step %d dropped: no later step was finite", position.step)
        self._write = self._position = None
        return {}

    def settle(self) -> dict[str, float]:
        """Wait for this rank's thread, then with all ranks make the save count or report it failed.

        Returns:
            The save's metrics.
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
            self._warn(now - self._started)
            self._begin_pruning(position.step)
        return {
            "ckpt/stall_seconds": self._stalled + now - waiting,
            "ckpt/total_seconds": now - self._started,
            "ckpt/bytes": sum(entry.size for entry in entries),
            "ckpt/failed": self._failed,
        }

    def save_now(self, position: Position) -> dict[str, float]:
        """Save and wait until it counts; returns the save's metrics.

        Raises:
            UserError: it failed every time it was tried.
        """
        self._failed_in_a_row = 0
        while True:
            values = self.start(position)
            if self.is_open:
                values = self.settle()
            if self._failed_in_a_row == 0:
                return values
            if not self.is_due_again:
                raise UserError(self._problem)

    def _check_run_dir(self, step: int) -> None:
        # Where a disk fails for now this save fails too, and is tried again.
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

    def _warn(self, seconds: float) -> None:
        """Say once if Slurm leaves no time for a save."""
        margin = self._recipe.checkpoint.time_limit_margin
        for kind, warning in save_warnings(seconds, read_launch(), margin).items():
            if kind not in self._warned:
                log.warning("%s", warning)
            self._warned.add(kind)

    def _begin_pruning(self, saved_step: int) -> None:
        """In a thread: to unlink gigabytes takes as long as to copy them off the device."""
        keep_last = self._recipe.checkpoint.keep_last
        if keep_last is None:
            return
        if self._pruning is not None:
            self._pruning.join()
        # No daemon: a run that ends waits for it.
        self._pruning = threading.Thread(
            target=self._prune, args=(saved_step, keep_last), name="checkpoint-prune"
        )
        self._pruning.start()

    def _prune(self, saved_step: int, keep_last: int) -> None:
        try:
            # The run has rolled back what lies beyond this save, or it is damaged.
            steps = [step for step in self._store.complete() if step <= saved_step]
            for step in prunable(steps, keep_last, self._recipe.checkpoint.keep_every):
                self._store.remove(step)
        except OSError as error:
            log.error("cannot remove an old checkpoint: %s", error)

    def _all(self, function: Callable[..., object], *arguments: object, only: bool) -> None:
        """Call on this rank (if ``only``), and raise everywhere if it failed anywhere."""
        problem = None
        try:
            if only:
                function(*arguments)
        except UserError as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            problem = f"cannot write the checkpoint in {self._store.directory}: {error}"
        fail_together(problem)


class _Write(threading.Thread):
    """Writes one rank's file; afterwards either ``entry`` or ``problem`` is there."""

    def __init__(self, path: Path, copy: HostCopy) -> None:
        super().__init__(name="checkpoint-write", daemon=True)
        self._path, self._copy = path, copy
        self.entry: FileEntry | None = None
        self.problem: str | None = None

    def run(self) -> None:
        """The thread's work."""
        try:
            self.entry = write_pieces(self._path, *self._copy.tensors)
        except Exception as error:  # reported by the main thread, on all ranks
            self.problem = self._said(error)

    def _said(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return f"cannot write {self._path}: {error}"
        said = f"cannot write {self._path}: {error.strerror}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return said
        tensors, _ = self._copy.tensors
        needed = sum(tensor.nbytes for tensor in tensors.values())
        # What is written of it so far goes when the save is given up.
        written = self._path.stat().st_size if self._path.exists() else 0
        free = shutil.disk_usage(self._path.parent).free + written
        return f"{said}; it needs {needed} bytes and its disk has {free} free"
