"""File lock that the kernel releases when the process that holds the lock ends.

The package filelock uses the same system call, but does not name the holder of a lock, leaves the
lock file behind, and fails on file systems without locks.
"""

import fcntl
import logging
import math
import os
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, os_error_text, shorten

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
# Longest time from the moment when a process takes the lock until it has written its name.
_NAME_SECONDS = 2.0


class FileLock:
    """A context that only one process at a time can enter for the same file.

    On a file system that does not support locks, the context is entered with a warning.

    Args:
        path: lock file; created on entry, with its folder if missing, and removed on exit.
        place: name of the locked resource in messages, such as ``run_dir runs/quickstart``.
        advice: advice for the user in messages, such as ``give another run_dir``.
        patience: seconds to wait for another process; a finite wait is announced on standard error.

    Raises:
        UserError: the file cannot be written, or another process keeps the lock.
    """

    def __init__(self, path: Path, place: str, advice: str, patience: float = 0.0) -> None:
        self._path, self._patience = path, patience
        self._place, self._advice = shorten(place), advice

    def __enter__(self) -> Self:
        try:
            self._made = not self._path.parent.exists()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
            self._wait()
            try:
                self._write_holder()
            except OSError:
                self.__exit__()
                raise
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(
                f"cannot write in {self._place}: {os_error_text(error)}; {self._advice}"
            ) from None
        return self

    def __exit__(self, *_: object) -> None:
        # Ignore errors: the folder may have other files, or may already be removed.
        with suppress(OSError):
            # If the folder was moved, this path may lead to the lock of another process.
            if self._is_in_place():
                self._path.unlink()
                if self._made:
                    self._path.parent.rmdir()
        os.close(self._descriptor)

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(
                f"{format_path(self._path)} is not a file; remove it, or {self._advice}"
            )
        return descriptor

    def _write_holder(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, holder.encode(), 0)

    def _wait(self) -> None:
        began, said = time.monotonic(), not math.isfinite(self._patience)
        while not self._taken():
            written = os.pread(self._descriptor, 200, 0).decode(errors="replace")
            holder = shorten(written) or "another process"
            waited = time.monotonic() - began
            if waited >= self._patience:
                os.close(self._descriptor)
                raise UserError(
                    f"{holder} uses {self._place}; wait until it ends, or {self._advice}"
                )
            # A process that has just taken the lock has not written its name yet.
            if not said and (written or waited > _NAME_SECONDS):
                print(
                    f"waiting up to {self._patience:.0f} s for {holder} to leave {self._place}",
                    file=sys.stderr,
                )
                said = True
            time.sleep(_POLL_SECONDS)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): make sure that only one process uses it",
                self._path,
                error,
            )
            return True
        # If the previous holder removed the file between open and flock, open it again.
        if self._is_in_place():
            return True
        os.close(self._descriptor)
        self._descriptor = self._open()
        return self._taken()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
