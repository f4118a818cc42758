"""Records of how the ranks of an attempt (start of a job's ranks) ended: one JSON file per rank.

If a rank could not write its file, its shell in ``launch/slurm.sh`` writes the exit status. A rank
without a file was probably killed together with its shell or node.
"""

import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import Field

from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path, read_json, shorten, write_durably
from diffmegatron.section import Section

log = logging.getLogger(__name__)

ATTEMPT = "DIFFMEGATRON_ATTEMPT"
"""Environment variable with the directory of the current attempt."""
HEARTBEAT = "heartbeat.json"
PREFLIGHT = "preflight.json"
"""Findings of the preflight checks of all ranks, written when the checks are done."""
EXIT_STOPPED = 75
"""Exit status of a run that was stopped and can be resumed (EX_TEMPFAIL of sysexits.h)."""
NOT_BEGUN = "before the run had begun"
"""Last words of :attr:`End.reason` if a signal stopped a rank that had nothing to save yet."""
_END_NAME = re.compile(r"rank_(\d{5,7})\.json(\.tmp)?")
# Shortest time between heartbeats. A write at every step could overload the file server.
_HEARTBEAT_SECONDS = 5.0
_MIN_REPORTS = 10


class End(Section):
    """Record of how one rank ended."""

    status: int  # exit status; 128 + N if signal N killed the rank
    reason: str = ""  # one sentence; empty after success, or if the rank could not write it
    step: int | None = None  # last step that the rank reached
    host: str = ""
    time: float = 0.0  # seconds since 1970, by the host's clock


class Heartbeat(Section):
    """Training progress that rank 0 writes every few seconds."""

    time: float  # seconds since 1970
    step: int
    run_dir: str  # folder of the run, or of the current stage
    first_step: int  # step from which the attempt began or resumed in run_dir
    reports: int = 0  # number of comparisons of the ranks' speeds in this attempt
    # rank -> number of comparisons in which it was much slower than most ranks
    slow: dict[int, int] = Field(default_factory=dict)

    @property
    def stragglers(self) -> list[int]:
        """Ranks that were slow in over half of the comparisons; none before ten comparisons."""
        if self.reports < _MIN_REPORTS:
            return []
        return [rank for rank, count in self.slow.items() if 2 * count > self.reports]


class RankRecord:
    """Writer of a rank's end and, on rank 0, of the heartbeat; a context manager around all work.

    ``folder`` is the directory of the attempt. If it is None, nothing is written.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.folder = folder
        self._rank = rank
        self._step: int | None = None
        self._start: tuple[str, int] | None = None
        self._last_heartbeat = 0.0
        self._reports, self._slow = 0, Counter[int]()

    @classmethod
    def of_environment(cls) -> Self:
        """Create this process's record; without ``DIFFMEGATRON_ATTEMPT``, it writes nothing."""
        folder, rank = os.environ.get(ATTEMPT), os.environ.get("RANK", "")
        return cls(Path(folder), int(rank)) if folder and rank.isdecimal() else cls()

    def set_step(self, step: int, run_dir: str) -> None:
        """Record that the run has reached a step; rank 0 writes a heartbeat from time to time."""
        self._step = step
        if self._start is None or self._start[0] != run_dir:
            self._start, self._last_heartbeat = (run_dir, step), 0.0
        now = time.time()
        if self._rank == 0 and now - self._last_heartbeat >= _HEARTBEAT_SECONDS:
            self._last_heartbeat = now
            self._write_heartbeat(now)

    def add_report(self, slow_ranks: Collection[int]) -> None:
        """Count one comparison of the ranks' speeds, and the ranks that were slow in it."""
        self._reports += 1
        self._slow.update(slow_ranks)

    def _write_heartbeat(self, now: float) -> None:
        assert self._step is not None and self._start is not None
        run_dir, first_step = self._start
        heartbeat = Heartbeat(
            time=now,
            step=self._step,
            run_dir=run_dir,
            first_step=first_step,
            reports=self._reports,
            slow=dict(self._slow),
        )
        self._write(HEARTBEAT, heartbeat)

    def end(self, status: int, reason: str = "") -> None:
        """Write the end of this rank, and on rank 0 a last heartbeat."""
        if self.folder is None:
            return
        now = time.time()
        if self._rank == 0 and self._step is not None:
            self._write_heartbeat(now)
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        end = End(status=status, reason=shorten(reason), step=self._step, host=host, time=now)
        self._write(end_name(self._rank), end)

    def _write(self, name: str, content: Section) -> None:
        if self.folder is None:
            return
        try:
            write_durably(self.folder / name, content.model_dump_json().encode())
        except OSError as error:  # A failed write must not end the run.
            log.warning("cannot write %s: %s", format_path(self.folder / name), error)

    @contextmanager
    def write_failures(self) -> Iterator[None]:
        """Write the end of this rank only if the ``with`` block raises (for preflight checks)."""
        try:
            yield
        except BaseException as error:
            self.end(*_status_of(error))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(*_status_of(error))


def _status_of(error: BaseException | None) -> tuple[int, str]:
    if error is None:
        return 0, ""
    if isinstance(error, UserError):
        return error.exit_status, str(error)
    code = getattr(error, "exit_code", None)  # typer.Exit has this attribute.
    if isinstance(code, int):
        return code, ""
    return 1, f"{type(error).__name__}: {error}"


def end_name(rank: int) -> str:
    """Return the file name of a rank's end."""
    return f"rank_{rank:05d}.json"


def read_ends(folder: Path) -> dict[int, End]:
    """Read the recorded end of each rank from the directory of an attempt; skip damaged files.

    If a rank has only a temporary file (suffix ``.tmp``), this file is read.
    """
    with explain_os_errors(f"cannot read {format_path(folder)}"):
        names = sorted(path.name for path in folder.iterdir())
    ends: dict[int, End] = {}
    # In sorted order, a rank's final file precedes its temporary file.
    for name in names:
        match = _END_NAME.fullmatch(name)
        if match is None or int(match[1]) in ends:
            continue
        try:
            ends[int(match[1])] = read_json(folder / name, End)
        except UserError as error:
            log.warning("skipped: %s", error)
    return ends


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """Read the last heartbeat of an attempt; return None if it is missing or damaged."""
    try:
        heartbeat: Heartbeat = read_json(folder / HEARTBEAT, Heartbeat)
    except UserError:
        return None
    return heartbeat
