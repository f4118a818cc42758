"""Metrics, events and other records: a failure to write them is logged and never ends training."""

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffmegatron.files import reason, shown

log = logging.getLogger(__name__)

# Records of hours: a run's entry of metrics has about a kilobyte.
_KEPT = 10_000


@contextmanager
def dispensable(path: Path) -> Iterator[None]:
    """Around the writing of a file that a run can do without: a failure is said, and passed over.

    Args:
        path: of the file, for the sentence.
    """
    try:
        yield
    except OSError as error:
        log.error("cannot write %s: %s; the run goes on", shown(path), reason(error))


class Records:
    """A file that a run appends to.

    Records that cannot be written (a full disk) are kept, the newest 10,000 of them, and written
    as soon as they can be. The log has one line when that begins and one when it ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[bytes] = deque(maxlen=_KEPT)
        self._lost = 0
        self._failing = False

    def append(self, record: bytes) -> None:
        """Write a record whole, after those that are still to be written; or keep it."""
        self._lost += len(self._pending) == _KEPT
        self._pending.append(record)
        try:
            self._write()
        except OSError as error:
            self._failed(error)
        else:
            self._recovered()

    def drop(self, is_unwanted: Callable[[bytes], bool]) -> None:
        """Give up records that are not yet written and are no longer wanted."""
        wanted = [record for record in self._pending if not is_unwanted(record)]
        self._pending = deque(wanted, maxlen=_KEPT)

    def close(self) -> None:
        """Try once more, and say what was never written."""
        with suppress(OSError):
            self._write()
        if lost := self._lost + len(self._pending):
            log.error("%s lacks %d records that could not be written", shown(self._path), lost)

    def _write(self) -> None:
        if not self._pending:
            return
        # Opened each time: a file that was removed is made again, a folder that was is noticed.
        # Without O_NONBLOCK a FIFO would be waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o666)
        try:
            while self._pending:
                _write_whole(descriptor, self._pending[0])
                self._pending.popleft()
        finally:
            os.close(descriptor)

    def _failed(self, error: OSError) -> None:
        if not self._failing:
            log.error(
                "cannot write %s: %s; the run goes on and tries again",
                shown(self._path),
                reason(error),
            )
        self._failing = True

    def _recovered(self) -> None:
        if self._failing:
            log.warning("%s is written again; %d records lost", shown(self._path), self._lost)
        self._failing, self._lost = False, 0


def _write_whole(descriptor: int, record: bytes) -> None:
    """All of a record at the end of a file, or nothing.

    Raises:
        OSError: it cannot be written.
    """
    status = os.fstat(descriptor)
    left = memoryview(record)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        if stat.S_ISREG(status.st_mode):
            os.ftruncate(descriptor, status.st_size)
        raise
