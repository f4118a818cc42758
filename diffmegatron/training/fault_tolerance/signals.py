"""Asked to stop: by a signal, or by the end of a Slurm job coming near."""

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
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.training.fault_tolerance.time_limit import TimeLimit

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Slurm signals every process of a step, a terminal every process of a job, and torchrun passes on
# to its ranks what it gets: one request arrives several times. What comes later is a second one.
_ONE_REQUEST_SECONDS = 5.0
_ONE_INTERRUPT_SECONDS = 1.0  # somebody waits at the keyboard


@contextmanager
def stopping_at_once(record: RankRecord) -> Iterator[None]:
    """A run that has not begun, and is asked to stop, has nothing to save: exit status 75.

    Around the imports of torch and all that follows, until :class:`StopRequest` is there.
    """

    def end(number: int, _: FrameType | None) -> None:
        record.end(EXIT_STOPPED, f"{signal.Signals(number).name} {NOT_BEGUN}")
        # Not by an exception: what is imported may catch it.
        os._exit(EXIT_STOPPED)

    previous = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class StopRequest:
    """Remembers that this rank was asked to stop; entered around one run or several in a row.

    It is entered in the main thread, which alone may handle signals.

    The first SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) is remembered for the ranks to agree on at the
    next step. A second one ends the process at once, with the status a shell gives such a death.
    Rank 0 alone watches the time limit, for all ranks.

    Args:
        folder: of the attempt; None: no job script has begun one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        launch = read_launch()
        self._speaks = launch.rank == 0
        self._limit = TimeLimit(launch.job_end, folder) if launch.rank == 0 else None
        self._first: float | None = None
        self._previous: dict[int, Any] = {}

    def is_pending(self, margin_seconds: float) -> bool:
        """Return whether the run is to save and end.

        Args:
            margin_seconds: before the end of a Slurm job, from which on it is.
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
            if self._speaks:
                # Not print: a handler may interrupt another one, which Python's streams refuse.
                name = signal.Signals(number).name
                with suppress(OSError):
                    os.write(2, f"{name}: stopping after this step; again: at once\n".encode())
        elif now - self._first > one_request:
            os._exit(128 + number)
