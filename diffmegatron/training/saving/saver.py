"""Asynchronous saves: training waits only for a copy to host memory, and a thread writes the copy.

A save becomes a checkpoint when every rank has written its file and the weights are sound. Saved
weights are sound if a later step had a finite loss and gradient norm. :meth:`Saver.save_now` does
not wait for a later step, so its caller must check the weights.
"""

import errno
import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron.checkpoint.checkpoint_format import Position, finish_checkpoint, rank_file
from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore, prunable
from diffmegatron.checkpoint.sharded import named_tensors, pieces_of, write_pieces
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import HeldFolder, format_path
from diffmegatron.model.parameter_shards import ParameterShards
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.parallel.parallel_state import ParallelState, errors_on_all_ranks, fail_together
from diffmegatron.parallel.random import random_states
from diffmegatron.training.monitoring.progress import print_line
from diffmegatron.training.safeguards import save_warnings

log = logging.getLogger(__name__)

# Retries after a failed save. If all fail, later saves are not retried until one succeeds.
_RETRIES = 2


class Saver:
    """Saver of a run's checkpoints; all ranks must call its methods in the same order.

    ``run_dir`` is used to detect that the run's folder was moved or removed; None except on rank 0.
    ``saved_step`` is the step of the last checkpoint that the run saved or resumed from, or None.
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
        self._buffers: dict[str, Tensor] = {}
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
        """True while this rank's thread is writing its file."""
        return self._write is not None and self._write.is_alive()

    @property
    def is_open(self) -> bool:
        """True from the start of a save until it is completed, is dropped or fails."""
        return self._position is not None

    def step_decided(self, *, finite: bool) -> None:
        """Record whether a step after the start of the save had a finite loss and gradient norm."""
        self._sound = self._sound or finite

    @property
    def is_ready(self) -> bool:
        """True if a save is open and its weights are sound: a later step was finite."""
        return self.is_open and self._sound

    @property
    def should_retry(self) -> bool:
        """True if the last save failed and has retries left."""
        return not self.is_open and 0 < self._failed_in_a_row <= _RETRIES

    def start(self, position: Position) -> dict[str, float]:
        """Start a save: copy tensors to host memory, and start the thread that writes them.

        Return metrics if the start fails, otherwise {}. If ``run_dir`` was moved or removed, raise
        UserError, because a new folder would lack the earlier checkpoints and the run's lock.
        """
        assert not self.is_open
        with self._errors_on_all_ranks():
            if self._run_dir is not None and not self._run_dir.is_in_place():
                raise UserError(
                    f"run_dir {format_path(self._store.directory.parent)} was moved, removed or "
                    f"replaced while the run was in it; step {position.step} could not be saved; "
                    "put it back and start the run again"
                )
        self._started = time.perf_counter()
        self._position, self._sound = position, False
        try:
            with self._errors_on_all_ranks():
                if self._parallel_state.is_main:
                    self._store.begin(position.step)
            tensors, places = self._copy_to_host()
        except UserError as error:
            return self._fail(position, str(error))
        path = self._store.unfinished_path(position.step) / rank_file(self._parallel_state.rank)
        self._write = _Write(path, tensors, places)
        self._write.start()
        self._stalled = time.perf_counter() - self._started
        return {}

    def wait(self) -> None:
        """Wait until this rank's threads have written the file and removed old checkpoints."""
        for thread in (self._write, self._pruning):
            if thread is not None:
                thread.join()

    def complete_or_drop(self) -> dict[str, float]:
        """Complete the save if its weights are sound, else delete its files; return metrics."""
        if not self.is_open:
            return {}
        if self._sound:
            return self.complete()
        position = self._position
        assert position is not None
        self.wait()
        fail_together(None)  # Wait for the other ranks, which may still write into the directory.
        if self._parallel_state.is_main:
            self._store.abandon(position.step)
            log.warning("checkpoint of step %d dropped: no later step was finite", position.step)
        self._write = self._position = None
        return {}

    def complete(self) -> dict[str, float]:
        """Wait until all ranks have written, and complete the checkpoint; return metrics.

        A failed save is logged and leaves no checkpoint. The caller must check that the weights are
        sound.
        """
        position, write = self._position, self._write
        assert position is not None and write is not None
        waiting = time.perf_counter()
        write.join()
        entries: list[Any] = [None] * self._parallel_state.world_size
        try:
            fail_together(write.problem)
            distributed.all_gather_object(entries, write.entry)
            with self._errors_on_all_ranks():
                if self._parallel_state.is_main:
                    finish_checkpoint(self._store, position, self._recipe, entries)
        except UserError as error:
            return self._fail(position, str(error))
        self._write = self._position = None
        self._failed_in_a_row = 0
        self.saved_step = position.step
        now = time.perf_counter()
        if self._parallel_state.is_main:
            print_line(f"saved {self._store.path(position.step)}")
            self._warn_if_slow(now - self._started)
            self._begin_pruning(position.step)
        return {
            "ckpt/stall_seconds": self._stalled + now - waiting,
            "ckpt/total_seconds": now - self._started,
            "ckpt/bytes": sum(entry.size for entry in entries),
            "ckpt/failed": self._failed,
        }

    def save_now(self, position: Position) -> dict[str, float]:
        """Save a checkpoint without waiting for a later finite step; return metrics.

        Retry failed saves immediately; raise UserError if all retries fail.
        """
        self._failed_in_a_row = 0
        while True:
            values = self.start(position)
            if self.is_open:
                values = self.complete()
            if self._failed_in_a_row == 0:
                return values
            if not self.should_retry:
                raise UserError(self._problem)

    def _copy_to_host(self) -> tuple[dict[str, Tensor], str]:
        """Return copies of this rank's tensors by name, and JSON with the position of each piece.

        A piece is a range of a weight or of its optimizer state. All saves use the same host
        buffers, because allocation is slow.
        """
        pieces = [
            piece
            for fragment in self._engine.fragments()
            for piece in pieces_of(
                self._shards[fragment.parameter], fragment.start, fragment.tensors
            )
            if piece.shard.is_primary
        ]
        tensors, places = named_tensors(pieces, random_states())
        for name, values in tensors.items():
            if name not in self._buffers:
                pinned = values.device.type == "cuda"
                # Checkpoints store float32; frozen weights may have another dtype, such as bf16.
                dtype = torch.float32 if values.is_floating_point() else values.dtype
                self._buffers[name] = torch.empty_like(
                    values, dtype=dtype, device="cpu", pin_memory=pinned
                )
            self._buffers[name].copy_(values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._buffers, places

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
        margin = self._recipe.checkpoint.time_limit_margin
        for kind, warning in save_warnings(seconds, self._launch, margin).items():
            if kind not in self._warned:
                log.warning("%s", warning)
            self._warned.add(kind)

    def _begin_pruning(self, saved_step: int) -> None:
        keep_last = self._recipe.checkpoint.keep_last
        if keep_last is None:
            return
        if self._pruning is not None:
            self._pruning.join()
        # No daemon: the process must not end before the thread.
        self._pruning = threading.Thread(
            target=self._prune, args=(saved_step, keep_last), name="checkpoint-prune"
        )
        self._pruning.start()

    def _prune(self, saved_step: int, keep_last: int) -> None:
        try:
            # Neither remove nor count checkpoints after saved_step. Their files have the right
            # sizes, but the last resume or rollback found damaged content and skipped them.
            steps = [step for step in self._store.complete() if step <= saved_step]
            for step in prunable(steps, keep_last, self._recipe.checkpoint.keep_every):
                self._store.remove(step)
        except OSError as error:
            log.error("cannot remove an old checkpoint: %s", error)

    @contextmanager
    def _errors_on_all_ranks(self) -> Iterator[None]:
        """Raise a UserError on all ranks if the code in the context raises an error on any rank."""
        with errors_on_all_ranks():
            try:
                yield
            except UserError:
                raise
            except Exception as error:
                where = self._store.directory
                raise UserError(f"cannot write the checkpoint in {where}: {error}") from error


class _Write(threading.Thread):
    """Thread that writes this rank's file, and then sets ``entry`` (success) or ``problem``."""

    def __init__(self, path: Path, tensors: dict[str, Tensor], places: str) -> None:
        super().__init__(name="checkpoint-write", daemon=True)
        self._path, self._tensors, self._places = path, tensors, places
        self.entry: FileEntry | None = None
        self.problem: str | None = None

    def run(self) -> None:
        """Write the file."""
        try:
            self.entry = write_pieces(self._path, self._tensors, self._places)
        except Exception as error:  # The main thread raises the problem on all ranks.
            self.problem = self._describe(error)

    def _describe(self, error: Exception) -> str:
        if not isinstance(error, OSError):
            return f"cannot write {self._path}: {error}"
        description = f"cannot write {self._path}: {error.strerror}"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return description
        needed = sum(tensor.nbytes for tensor in self._tensors.values())
        # The partly written file will be deleted, so its bytes count as free.
        written = self._path.stat().st_size if self._path.exists() else 0
        free = shutil.disk_usage(self._path.parent).free + written
        return f"{description}; it needs {needed} bytes and its disk has {free} free"
