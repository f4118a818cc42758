"""A rank that stops making progress writes its stacks and ends, so that the job restarts."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from diffmegatron.config.recovery_config import WatchdogConfig
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.training.monitoring.records import dispensable

STACKS = "stacks"
_STANDARD_ERROR = 2


class Watchdog:
    """Ends this process if a step, or a save, takes longer than configured.

    The clock is faulthandler's, a thread in C: one in Python would wait for the interpreter's lock
    with everything else where a call into a library hangs while it holds it. When time is up,
    the stacks of all threads go to ``folder/stacks/rank_XXXXX.txt`` and the process exits with
    status 1. The launcher then ends the other ranks by SIGTERM, upon which they write theirs.
    Where no file can be made there the stacks go to standard error.
    """

    def __init__(self, config: WatchdogConfig, folder: Path) -> None:
        self._config = config
        # The launcher's word for it: the clock runs while the ranks still meet.
        self._path = folder / STACKS / f"rank_{read_launch().rank:05d}.txt"
        self._limit = config.startup_seconds
        # Of the file when it was opened; None: there is none.
        self._size: int | None = None

    def __enter__(self) -> Self:
        if self._config.enabled:
            self._file = self._open()
            # Without the interpreter, so that a rank inside a collective that never ends writes.
            faulthandler.register(signal.SIGTERM, self._file, all_threads=True, chain=True)
            self._arm()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._config.enabled:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.unregister(signal.SIGTERM)
            if error is None and self._size is not None:
                # The stacks of a signal that the run has answered by a save say nothing.
                with dispensable(self._path):
                    os.ftruncate(self._file, self._size)
            self._close()

    def _open(self) -> int:
        with dispensable(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            descriptor = os.open(self._path, flags, 0o666)
            self._size = os.fstat(descriptor).st_size
            return descriptor
        return os.dup(_STANDARD_ERROR)

    def _close(self) -> None:
        is_empty = os.fstat(self._file).st_size == 0
        os.close(self._file)
        # Not there any more, or not empty.
        with suppress(OSError):
            if is_empty:
                self._path.unlink()
            self._path.parent.rmdir()

    def progress(self) -> None:
        """A step or an evaluation batch is done; the next may take ``step_seconds``."""
        self._limit = self._config.step_seconds
        self._arm()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Something that may take as long as starting up: a save, a load."""
        limit, self._limit = self._limit, self._config.startup_seconds
        self._arm()
        yield
        self._limit = limit
        self._arm()

    def _arm(self) -> None:
        if self._config.enabled:
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._file)
