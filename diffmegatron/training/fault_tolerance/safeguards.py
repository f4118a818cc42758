"""Run lock, stop signals and watchdog: protection of a run from other runs, signals and hangs."""

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
from diffmegatron.files import format_path, read_text
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.training.monitoring.records import log_write_errors

log = logging.getLogger(__name__)

LOCK = "lock"
# Time that a new run waits for the lock of an earlier run. The operating system releases a lock
# when its process ends, even by SIGKILL. If the whole machine crashed, a file server releases the
# lock only later: NFS 4 after a lease of 90 seconds.
_LOCK_PATIENCE_SECONDS = 120.0

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# A rank can receive the same stop request several times: Slurm signals every process of a step, a
# terminal signals every process of its foreground job, and torchrun forwards signals to its ranks.
# Signals within this time count as one request; a later signal is a second request.
_ONE_REQUEST_SECONDS = 5.0
# Like _ONE_REQUEST_SECONDS, but for SIGINT (Ctrl-C). It is shorter, because a person who presses
# Ctrl-C again waits at the keyboard.
_ONE_INTERRUPT_SECONDS = 1.0

JOB_END = "job_end"
"""Name of the file with the end time of the Slurm job, in the directory of the attempt.

The job script keeps the file up to date. An attempt is one start of the run by the job script.
"""
_MAX_JOB_END_BYTES = 100
# Minimum seconds between two readings of the file JOB_END. Steps can take milliseconds, and reading
# the file at each step would load the file server.
_JOB_END_SECONDS = 10.0

STACKS = "stacks"
_STANDARD_ERROR = 2


def run_lock(run_dir: Path, patience: float = _LOCK_PATIENCE_SECONDS) -> FileLock:
    """Return a lock that prevents a second run in the same ``run_dir``.

    Two runs in one directory would overwrite each other's checkpoints. Rank 0 enters the lock as a
    context manager and holds it during the run.

    Raises:
        UserError: On entering, if ``run_dir`` cannot be created or written, or if another run
            holds the lock for longer than ``patience`` seconds.
    """
    return FileLock(run_dir / LOCK, f"run_dir {run_dir}", "give another run_dir", patience)


def check_not_a_file(run_dir: Path) -> None:
    """Raise a UserError if ``run_dir`` is a file."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(
            f"run_dir {format_path(run_dir)} is a file; give a directory, or a path that is free"
        )


@contextmanager
def exit_on_stop_signal(record: RankRecord) -> Iterator[None]:
    """End the process with exit status 75 if a stop signal arrives inside the context.

    This context is for the start of a process, from before the import of torch until
    :class:`StopRequest` is entered. During this time there is nothing to save.

    Args:
        record: record of this rank for the job script; the name of the signal is written to it.
    """

    def end(number: int, _: FrameType | None) -> None:
        record.end(EXIT_STOPPED, f"{signal.Signals(number).name} {NOT_BEGUN}")
        # Do not raise: the module that is being imported could catch the exception.
        os._exit(EXIT_STOPPED)

    previous = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Handler of stop signals to this rank; a context manager around one or more runs.

    It must be entered in the main thread. The first SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) is stored.
    At the end of the step all ranks exchange whether a rank has received a signal, so that all stop
    together. A second signal, more than a few seconds after the first, ends the process at once
    with the exit status that a shell reports for that signal. Rank 0 also checks the job's time
    limit, for all ranks.

    Args:
        launch: environment variables of the launcher and the job for this rank.
        folder: directory of the attempt (one start of the run by the job script); None without a
            job script.
    """

    def __init__(self, launch: LaunchEnvironment, folder: Path | None = None) -> None:
        self._prints = launch.rank == 0
        self._limit = TimeLimit(launch.job_end, folder) if launch.rank == 0 else None
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def is_pending(self, margin_seconds: float) -> bool:
        """Return whether this rank has a reason to save and end the run.

        The reason is a stop signal, or, on rank 0 only, that the end of the Slurm job is near.

        Args:
            margin_seconds: seconds before the end of a Slurm job at which the run should stop.
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
                # print() fails if this handler interrupts another print(); os.write() does not.
                name = signal.Signals(number).name
                with suppress(OSError):
                    os.write(2, f"{name}: stopping after this step; again: at once\n".encode())
        elif now - self._first > one_request:
            os._exit(128 + number)


class TimeLimit:
    """The end time of a Slurm job, which an administrator can change while the job runs.

    Args:
        at_start: end time known at the start of the job, in seconds since 1970; None if unknown.
        folder: directory of the attempt, into which ``slurm.sh`` writes the present end time; None
            without a job script.
    """

    def __init__(self, at_start: float | None, folder: Path | None) -> None:
        self._end, self._folder = at_start, folder
        self._next_reading = 0.0

    def is_within(self, seconds: float) -> bool:
        """Return whether the job ends in less than ``seconds``, or is past its end time."""
        self._read()
        return self._end is not None and time.time() > self._end - seconds

    def _read(self) -> None:
        """Read the present end time from the file ``JOB_END``, at most once in ten seconds.

        The last end time is kept if the file is missing or damaged. The content ``none`` means that
        the job has no time limit.
        """
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
    """Timer that ends this process if a step or a save takes too long, so that the job restarts.

    When the time is up, the stacks of all threads are written to ``folder/stacks/rank_XXXXX.txt``,
    or to standard error if the file cannot be created. Then the process exits with status 1. The
    launcher ends the other ranks by SIGTERM, and each of them writes its stacks too.

    The timer is faulthandler's thread, which is written in C. A Python thread could not run if a
    library call hangs while it holds the global interpreter lock.

    Args:
        config: time limits.
        folder: directory in which ``stacks`` is created.
        rank: rank of this process, as the launcher numbers it. The timer starts before
            torch.distributed is initialized, so torch's rank is not available yet.
    """

    def __init__(self, config: WatchdogConfig, folder: Path, rank: int) -> None:
        self._config = config
        self._path = folder / STACKS / f"rank_{rank:05d}.txt"
        self._limit = config.startup_seconds
        # Size of the file in bytes when it was opened; None if it could not be opened.
        self._size: int | None = None

    def __enter__(self) -> Self:
        if self._config.enabled:
            self._file = self._open()
            # Write the stacks also on SIGTERM, which the launcher sends after the watchdog of
            # another rank has ended that rank. The handler is in C, so it also runs while this rank
            # hangs inside a collective.
            faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)
            self._arm()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._config.enabled:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
            if error is None and self._size is not None:
                # The run ended without an error. If a stop signal wrote stacks, remove them.
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
        # Ignore errors: the file may be missing, or the folder not empty because other ranks have
        # written their stacks.
        with suppress(OSError):
            if is_empty:
                self._path.unlink()
            self._path.parent.rmdir()

    def restart_timer(self) -> None:
        """Restart the timer with the limit ``watchdog.step_seconds``.

        The training loop calls this after each step and after each batch of an evaluation.
        """
        self._limit = self._config.step_seconds
        self._arm()

    @contextmanager
    def long_limit(self) -> Iterator[None]:
        """Set the limit to ``watchdog.startup_seconds`` inside the context, for a save or a load.

        The timer restarts at the beginning and at the end.
        """
        limit, self._limit = self._limit, self._config.startup_seconds
        self._arm()
        yield
        self._limit = limit
        self._arm()

    def _arm(self) -> None:
        if self._config.enabled:
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._file)
