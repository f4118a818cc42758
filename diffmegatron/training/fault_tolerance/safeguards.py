"""Protect a run from other runs, signals and hangs: run lock, stop requests, watchdog."""

import faulthandler
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from diffmegatron.attempts.ends import EXIT_STOPPED, NOT_BEGUN, RankRecord
from diffmegatron.config.recovery_config import WatchdogConfig
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import read_text, shown
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.training.monitoring.records import log_write_errors

log = logging.getLogger(__name__)

LOCK = "lock"
# The operating system releases a lock when its process ends, even by SIGKILL. A file server may
# hold the lock of a dead machine longer: NFS 4 for a lease of 90 seconds.
_LOCK_PATIENCE_SECONDS = 120.0

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One request arrives several times: Slurm signals every process of a step, a terminal every
# process of a job, and torchrun forwards signals to its ranks. A later signal is a second request.
_ONE_REQUEST_SECONDS = 5.0
_ONE_INTERRUPT_SECONDS = 1.0  # A person waits at the keyboard.

JOB_END = "job_end"
"""File in an attempt's directory with the job's end, which the job script keeps up to date."""
_MAX_JOB_END_BYTES = 100
# Steps can take milliseconds, and reading the file at each would load the file server.
_JOB_END_SECONDS = 10.0

STACKS = "stacks"
_STANDARD_ERROR = 2


def run_lock(run_dir: Path, patience: float = _LOCK_PATIENCE_SECONDS) -> FileLock:
    """Return the lock that keeps a second run out of ``run_dir``; rank 0 enters it.

    Two runs in one directory would overwrite each other's checkpoints.

    Raises:
        UserError: On entering, if ``run_dir`` cannot be created or written, or if another run
            holds the lock for longer than ``patience`` seconds.
    """
    return FileLock(run_dir / LOCK, f"run_dir {run_dir}", "give another run_dir", patience)


def refuse_a_file(run_dir: Path) -> None:
    """Raise a UserError if ``run_dir`` is a file."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(
            f"run_dir {shown(run_dir)} is a file; give a directory, or a path that is free"
        )


@contextmanager
def stopping_at_once(record: RankRecord) -> Iterator[None]:
    """End the process with exit status 75 on a stop signal: there is nothing to save yet.

    Covers the imports of torch and everything else before :class:`StopRequest` is entered.
    """

    def end(number: int, _: FrameType | None) -> None:
        record.end(EXIT_STOPPED, f"{signal.Signals(number).name} {NOT_BEGUN}")
        # An exception could be caught by the module that is being imported.
        os._exit(EXIT_STOPPED)

    previous = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Remembers a stop signal to this rank; entered in the main thread around one or more runs.

    The first SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) is remembered until the ranks agree on it at the
    next step. A second one ends the process at once, with the exit status that a shell reports for
    that signal. Rank 0 also watches the job's time limit, for all ranks.

    Args:
        launch: environment of this rank.
        folder: directory of the attempt; None if no job script has begun one.
    """

    def __init__(self, launch: LaunchEnvironment, folder: Path | None = None) -> None:
        self._prints = launch.rank == 0
        self._limit = TimeLimit(launch.job_end, folder) if launch.rank == 0 else None
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def is_pending(self, margin_seconds: float) -> bool:
        """Return whether the run should save and end.

        Args:
            margin_seconds: how long before the end of a Slurm job the run should stop.
        """
        return self._first is not None or (
            self._limit is not None and self._limit.is_within(margin_seconds)
        )

    def __enter__(self) -> Self:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _receive(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        one_request = _ONE_INTERRUPT_SECONDS if number == signal.SIGINT else _ONE_REQUEST_SECONDS
        if self._first is None:
            self._first = now
            if self._prints:
                # print() fails in a handler that interrupts another print(); os.write does not.
                name = signal.Signals(number).name
                with suppress(OSError):
                    os.write(2, f"{name}: stopping after this step; again: at once\n".encode())
        elif now - self._first > one_request:
            os._exit(128 + number)


class TimeLimit:
    """The end of a Slurm job, which an administrator may move while the job runs.

    Args:
        at_start: end of the job as known at its start, in seconds since 1970; None if unknown.
        folder: directory of the attempt, where ``slurm.sh`` writes the present end; None if there
            is no attempt.
    """

    def __init__(self, at_start: float | None, folder: Path | None) -> None:
        self._end, self._folder = at_start, folder
        self._next_reading = 0.0

    def is_within(self, seconds: float) -> bool:
        """Return whether the job ends within so many seconds, or has already reached its end."""
        self._read()
        return self._end is not None and time.time() > self._end - seconds

    def _read(self) -> None:
        """Read the present end; keep the known end if the file is missing or damaged."""
        if self._folder is None or time.monotonic() < self._next_reading:
            return
        self._next_reading = time.monotonic() + _JOB_END_SECONDS
        try:
            text = read_text(self._folder / JOB_END, max_bytes=_MAX_JOB_END_BYTES).strip()
        except UserError:
            return
        if text == "none":
            self._end = None
        elif text.isascii() and text.isdecimal():
            self._end = float(text)


class Watchdog:
    """Ends this process if a step or a save takes longer than configured, so the job restarts.

    The clock is faulthandler's thread in C: a Python thread would wait for the interpreter's lock
    while a library call hangs with the lock held. When the time is up, the stacks of all threads
    are written to ``folder/stacks/rank_XXXXX.txt`` and the process exits with status 1. The
    launcher then ends the other ranks by SIGTERM, and each writes its stacks too. If the file
    cannot be created, the stacks are written to standard error.

    Args:
        config: time limits.
        folder: directory in which ``stacks`` is created.
        rank: rank of this process by its launcher; the clock already runs while the ranks meet.
    """

    def __init__(self, config: WatchdogConfig, folder: Path, rank: int) -> None:
        self._config = config
        self._path = folder / STACKS / f"rank_{rank:05d}.txt"
        self._limit = config.startup_seconds
        # Bytes of the file when it was opened; None if it could not be opened.
        self._size: int | None = None

    def __enter__(self) -> Self:
        if self._config.enabled:
            self._file = self._open()
            # The C handler also runs while a rank is inside a collective that never ends.
            faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)
            self._arm()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._config.enabled:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
            if error is None and self._size is not None:
                # The run saved after its stop signal, so the stacks of that moment are not needed.
                with log_write_errors(self._path):
                    os.ftruncate(self._file, self._size)
            self._close()

    def _open(self) -> int:
        with log_write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            descriptor = os.open(self._path, flags, 0o666)
            self._size = os.fstat(descriptor).st_size
            return descriptor
        return os.dup(_STANDARD_ERROR)

    def _close(self) -> None:
        is_empty = os.fstat(self._file).st_size == 0
        os.close(self._file)
        # The file may be missing, and the folder may hold the stacks of other ranks.
        with suppress(OSError):
            if is_empty:
                self._path.unlink()
            self._path.parent.rmdir()

    def progress(self) -> None:
        """Allow ``step_seconds`` for the next step or evaluation batch."""
        self._limit = self._config.step_seconds
        self._arm()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Allow ``startup_seconds`` for the work inside, such as a save or a load."""
        limit, self._limit = self._limit, self._config.startup_seconds
        self._arm()
        yield
        self._limit = limit
        self._arm()

    def _arm(self) -> None:
        if self._config.enabled:
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._file)
