"""Writing of metrics, events and other records: an error is logged and never ends training."""

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffmegatron.files import reason, shown

log = logging.getLogger(__name__)

# Several hours of records: an entry of metrics has about a kilobyte.
_KEPT = 10_000


@contextmanager
def log_write_errors(path: Path, errors: type[Exception] = OSError) -> Iterator[None]:
    """Log an error of the writing inside, and let the run continue.

    Args:
        path: file or folder to name in the log.
        errors: class of the errors that the writing may raise.
    """
    try:
        yield
    except errors as error:
        log.error("cannot write %s: %s; the run continues", shown(path), reason(error))


class Records:
    """A file that a run appends to, with a buffer for records that cannot be written.

    While writing fails (a full disk), the newest 10,000 records are kept, and written as soon as
    possible. The log has one line when that begins and one when it ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[bytes] = deque(maxlen=_KEPT)
        self._lost = 0
        self._failing = False

    def append(self, record: bytes) -> None:
        """Write pending records and this one, or keep it pending."""
        self._lost += len(self._pending) == _KEPT
        self._pending.append(record)
        try:
            self._write()
        except OSError as error:
            self._failed(error)
        else:
            self._recovered()

    def drop(self, is_unwanted: Callable[[bytes], bool]) -> None:
        """Discard pending records that are no longer wanted."""
        wanted = [record for record in self._pending if not is_unwanted(record)]
        self._pending = deque(wanted, maxlen=_KEPT)

    def close(self) -> None:
        """Try to write pending records once more, and log the number that is lost."""
        with suppress(OSError):
            self._write()
        if lost := self._lost + len(self._pending):
            log.error("%s lacks %d records that could not be written", shown(self._path), lost)

    def _write(self) -> None:
        if not self._pending:
            return
        # Open the file each time, to recreate a removed file and to notice a removed folder.
        # O_NONBLOCK makes opening a FIFO fail instead of wait.
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
                "cannot write %s: %s; the run continues and tries again",
                shown(self._path),
                reason(error),
            )
        self._failing = True

    def _recovered(self) -> None:
        if self._failing:
            log.warning("%s is written again; %d records lost", shown(self._path), self._lost)
        self._failing, self._lost = False, 0


def _write_whole(descriptor: int, record: bytes) -> None:
    """Append a whole record to a file, or raise an OSError and leave the file unchanged."""
    status = os.fstat(descriptor)
    left = memoryview(record)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        if stat.S_ISREG(status.st_mode):
            os.ftruncate(descriptor, status.st_size)
        raise
