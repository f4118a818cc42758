"""Protection of a run: run lock, stop signals, Slurm's time limits, watchdog.

This module does not import torch.
"""

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
from diffmegatron.files import format_path, read_text, write_durably
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.training.monitoring.records import log_write_errors

log = logging.getLogger(__name__)

LOCK = "lock"
# NFS 4 releases the lock of a crashed machine only after a lease of 90 seconds.
_LOCK_PATIENCE_SECONDS = 120.0

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Signals within this time count as one stop request, because Slurm and torchrun may both send a
# signal.
_ONE_REQUEST_SECONDS = 5.0
_ONE_INTERRUPT_SECONDS = 1.0  # The same time for SIGINT, which a person sends by Ctrl-C.

JOB_END = "job_end"
"""File in the attempt's directory with the end time of the Slurm job; the job script updates it."""
_MAX_JOB_END_BYTES = 100
# Time between two reads of JOB_END. Steps may take milliseconds, and a read in every step would
# load the file server.
_JOB_END_SECONDS = 10.0

STOPPED_AT = "stopped_at"
"""File in ``run_dir`` with the progress at which a job's end stopped the run before a new step."""
_MAX_PROGRESS_BYTES = 10_000

STACKS = "stacks"
_STANDARD_ERROR = 2


def run_lock(run_dir: Path, patience: float = _LOCK_PATIENCE_SECONDS) -> FileLock:
    """Return a lock that prevents a second run in the same ``run_dir``; only rank 0 enters it.

    On entering, raise UserError if another run holds the lock for longer than ``patience`` seconds.
    """
    return FileLock(run_dir / LOCK, f"run_dir {run_dir}", "give another run_dir", patience)


def read_job_end(folder: Path, known: float | None) -> float | None:
    """Return the end of the Slurm job in seconds since 1970; None without a time limit.

    ``folder`` is the attempt's directory. Without a readable file there, return ``known``.
    """
    with suppress(UserError):
        text = read_text(folder / JOB_END, max_bytes=_MAX_JOB_END_BYTES).strip()
        if text == "none":
            return None
        if text.isascii() and text.isdecimal():
            return float(text)
    return known


@contextmanager
def exit_on_stop_signal(record: RankRecord) -> Iterator[None]:
    """End the process with exit status 75 if a stop signal arrives inside the context.

    Use it before training begins, when there is nothing to save. A :class:`StopRequest` that is
    entered inside the context replaces the signal handlers.
    """

    def end(number: int, _: FrameType | None) -> None:
        record.end(EXIT_STOPPED, f"{signal.Signals(number).name} {NOT_BEGUN}")
        # Do not raise an exception, because a module that is being imported could catch it.
        os._exit(EXIT_STOPPED)

    previous = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Handler of stop signals to this rank; a context manager around one or more runs.

    The first SIGTERM, SIGUSR1 or SIGINT requests a stop. A later signal ends the process if it
    arrives more than 5 seconds (SIGINT: 1 second) after the first. Rank 0 also requests a stop
    before the Slurm job ends. ``folder`` is the directory of the file ``job_end``, in which
    ``slurm.sh`` updates the job's end time. None: the end time stays as it was at the start.
    """

    def __init__(self, launch: LaunchEnvironment, folder: Path | None = None) -> None:
        self._is_main = launch.rank == 0
        self._job_end, self._folder = launch.job_end, folder
        self._signal_seconds = launch.signal_seconds or 0.0
        self._next_reading = 0.0
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def is_pending(self, margin_seconds: float) -> bool:
        """Return whether this rank received a stop signal.

        On rank 0, also return True if the Slurm job ends in less than ``margin_seconds``.
        """
        if self._first is not None or not self._is_main:
            return self._first is not None
        if self._folder is not None and time.monotonic() >= self._next_reading:
            self._next_reading = time.monotonic() + _JOB_END_SECONDS
            self._job_end = read_job_end(self._folder, self._job_end)
        return self._job_end is not None and time.time() > self._job_end - margin_seconds

    def is_due_to_job_end(self, margin_seconds: float) -> bool:
        """Return whether a stop is due to the end of the Slurm job; call this on rank 0.

        The stop is requested ``margin_seconds`` before the end, or earlier by Slurm's stop signal.
        """
        lead = max(margin_seconds, self._signal_seconds)
        return self._job_end is not None and time.time() > self._job_end - lead

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
            if self._is_main:
                # print() fails in a handler that interrupts another print().
                name = signal.Signals(number).name
                with suppress(OSError):
                    os.write(2, f"{name}: stopping after this step; again: at once\n".encode())
        elif now - self._first > one_request:
            os._exit(128 + number)


def check_progress(run_dir: Path, progress: str, margin_seconds: float) -> None:
    """Raise UserError if the job's end has stopped a run twice at the same ``progress``.

    Call this on rank 0 when the end of a job stops a run before a new step. ``progress`` is text
    such as "step 12". The first call for it writes a file in ``run_dir``, which the second reads.
    """
    path, before = run_dir / STOPPED_AT, ""
    with suppress(UserError):
        before = read_text(path, max_bytes=_MAX_PROGRESS_BYTES)
    if before == progress:
        raise UserError(
            f"the end of the job has stopped {format_path(run_dir)} twice at {progress}, without a "
            "new step; give the job a longer time limit, or lower checkpoint.time_limit_margin "
            f"{margin_seconds:g}"
        )
    with log_write_errors(path):
        write_durably(path, progress.encode())


def save_warnings(seconds: float, launch: LaunchEnvironment, margin: float) -> dict[str, str]:
    """Return warnings by name if a save that took ``seconds`` is too slow for Slurm's time limits.

    "kill wait": the save takes longer than the time from Slurm's SIGTERM to its SIGKILL. "lead":
    two saves take longer than the time from the stop of the run to the end of the job. The run
    stops at Slurm's stop signal or ``margin`` seconds before the job's end, whichever is earlier.
    """
    warnings = {}
    if launch.kill_wait is not None and seconds > launch.kill_wait:
        warnings["kill wait"] = too_long_for_kill_wait(seconds, launch.kill_wait)
    lead = max(launch.signal_seconds or 0.0, margin)
    if launch.job_end is not None and 2 * seconds > lead:
        warnings["lead"] = (
            f"a save has taken {seconds:.0f} s, and the run stops {lead:.0f} s before the time "
            "limit, which must be at least twice a save; raise checkpoint.time_limit_margin above "
            f"{2 * seconds:.0f}, which applies from the next attempt on"
        )
    return warnings


def too_long_for_kill_wait(seconds: float, kill_wait: float) -> str:
    """Return the warning about a save that takes longer than KillWait (both in seconds)."""
    return (
        f"a save has taken {seconds:.0f} s, and {kill_wait:.0f} s after a SIGTERM Slurm kills "
        "(KillWait): to stop the job use scancel --signal=USR1, never scancel alone"
    )


class Watchdog:
    """Timer that ends this process if a step or a save takes too long, so that the job restarts.

    It first writes the stacks of all threads to ``folder/stacks/rank_XXXXX.txt``. The launcher then
    ends the other ranks by SIGTERM, and they write their stacks too. The timer is faulthandler's
    thread in C, because a Python thread could not run while a hanging library call holds the global
    interpreter lock.
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
            # This handler in C also runs while this rank hangs inside a collective.
            faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)
            self._arm()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._config.enabled:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
            if error is None and self._size is not None:
                # Remove stacks that a stop signal wrote.
                with log_write_errors(self._path):
                    os.ftruncate(self._file, self._size)
            is_empty = os.fstat(self._file).st_size == 0
            os.close(self._file)
            with suppress(OSError):  # The folder may contain the stacks of other ranks.
                if is_empty:
                    self._path.unlink()
                self._path.parent.rmdir()

    def _open(self) -> int:
        with log_write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            descriptor = os.open(self._path, flags, 0o666)
            self._size = os.fstat(descriptor).st_size
            return descriptor
        return os.dup(_STANDARD_ERROR)

    def restart_timer(self) -> None:
        """Restart the timer with the limit ``watchdog.step_seconds``."""
        self._limit = self._config.step_seconds
        self._arm()

    @contextmanager
    def long_limit(self) -> Iterator[None]:
        """Use the limit ``watchdog.startup_seconds`` inside the context, e.g. for a save.

        The timer restarts at the beginning and at the end of the context. :meth:`restart_timer`
        inside the context ends the long limit early.
        """
        limit, self._limit = self._limit, self._config.startup_seconds
        self._arm()
        yield
        self._limit = limit
        self._arm()

    def _arm(self) -> None:
        if self._config.enabled:
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._file)
