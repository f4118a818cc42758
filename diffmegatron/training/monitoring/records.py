"""Writing of a run's metrics and reports; write errors are logged and never end the training."""

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffmegatron.files import format_path, os_error_text

log = logging.getLogger(__name__)

_KEPT = 10_000  # Maximum number of records in memory: several hours of metrics, about 10 MB.


@contextmanager
def log_write_errors(path: Path, errors: type[Exception] = OSError) -> Iterator[None]:
    """Catch exceptions of type ``errors`` inside the context, and log them with ``path``."""
    try:
        yield
    except errors as error:
        log.error("cannot write %s: %s; the run continues", format_path(path), os_error_text(error))


class MetricRecords:
    """File to which a run appends records; the newest 10,000 stay in memory while writing fails."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[bytes] = deque(maxlen=_KEPT)
        self._lost = 0
        self._failing = False

    def append(self, record: bytes) -> None:
        """Write the pending records and then ``record``; unwritten records stay pending."""
        self._lost += len(self._pending) == _KEPT
        self._pending.append(record)
        try:
            self._write()
        except OSError as error:
            if not self._failing:
                log.error(
                    "cannot write %s: %s; the run continues and tries again",
                    format_path(self._path),
                    os_error_text(error),
                )
            self._failing = True
        else:
            if self._failing:
                log.warning(
                    "%s is written again; %d records lost", format_path(self._path), self._lost
                )
            self._failing, self._lost = False, 0

    def drop(self, is_unwanted: Callable[[bytes], bool]) -> None:
        """Discard the pending records for which ``is_unwanted`` returns True."""
        wanted = [record for record in self._pending if not is_unwanted(record)]
        self._pending = deque(wanted, maxlen=_KEPT)

    def close(self) -> None:
        """Try to write pending records once more, and log the number of lost records."""
        with suppress(OSError):
            self._write()
        if lost := self._lost + len(self._pending):
            log.error(
                "%s lacks %d records that could not be written", format_path(self._path), lost
            )

    def _write(self) -> None:
        if not self._pending:
            return
        # Opening for each write recreates a removed file and detects a removed folder. With
        # O_NONBLOCK, opening a FIFO without a reader fails instead of waiting.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, 0o666)
        try:
            while self._pending:
                _write_whole(descriptor, self._pending[0])
                self._pending.popleft()
        finally:
            os.close(descriptor)


def _write_whole(descriptor: int, record: bytes) -> None:
    """Append a record to a file; after an error, remove the part that was written."""
    status = os.fstat(descriptor)
    left = memoryview(record)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        if stat.S_ISREG(status.st_mode):
            os.ftruncate(descriptor, status.st_size)
        raise
