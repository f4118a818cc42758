"""One run at a time in a ``run_dir``: two would write each other's checkpoints."""

import fcntl
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Self

from diffmegatron.errors import UserError

log = logging.getLogger(__name__)

LOCK = "lock"
# A lock ends with its process, also with one that was killed. Across machines a file server may
# hold that of a dead machine longer: NFS 4 for a lease of 90 seconds.
_PATIENCE_SECONDS = 120.0
_POLL_SECONDS = 0.2


class RunLock:
    """A context in which no other process is in it for the same ``run_dir``; rank 0 takes it.

    An advisory lock on ``run_dir/lock`` (flock), which the kernel releases with the process, so
    that no file left behind ever blocks a restart. Another run's is waited for: it may be ending.

    Raises:
        UserError: ``run_dir`` cannot be made or written, or another run stays in it.
    """

    def __init__(self, run_dir: Path, patience: float = _PATIENCE_SECONDS) -> None:
        self._path = run_dir / LOCK
        self._patience = patience

    def __enter__(self) -> Self:
        self._made = not self._path.parent.exists()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._open()
        except OSError as error:
            raise UserError(
                f"cannot write in run_dir {self._path.parent}: {error.strerror}; give another"
            ) from None
        self._wait()
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)
        if self._made and not any(self._path.parent.iterdir()):
            self._path.parent.rmdir()

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)

    def _wait(self) -> None:
        deadline, said = time.monotonic() + self._patience, False
        while not self._taken():
            holder = os.pread(self._descriptor, 200, 0).decode(errors="replace")
            if time.monotonic() > deadline:
                os.close(self._descriptor)
                raise UserError(
                    f"another run is in run_dir {self._path.parent} ({holder}); let it end, or "
                    "give another run_dir"
                )
            if not said:
                print(f"waiting for {holder} to leave {self._path.parent}", file=sys.stderr)
                said = True
            time.sleep(_POLL_SECONDS)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning("%s cannot be locked (%s): see to it that one run", self._path, error)
            return True
        # The one before may have removed the file between our opening and our locking it.
        try:
            if os.path.samestat(self._path.stat(), os.fstat(self._descriptor)):
                return True
        except FileNotFoundError:
            pass
        os.close(self._descriptor)
        self._descriptor = self._open()
        return False
