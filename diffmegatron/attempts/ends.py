"""Records of how the ranks of an attempt ended: one JSON file per rank in the attempt's directory.

An attempt is one start of a job's ranks. A rank writes its own file when it ends. If a signal
or the watchdog ends the rank before that, the rank's shell in ``slurm.sh`` writes a file with the
exit status, host and time. A rank without a file was killed together with its shell or node.
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
from types import TracebackType
from typing import Self

from pydantic import Field

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_json, shorten, write_durably
from diffmegatron.section import Section

log = logging.getLogger(__name__)

ATTEMPT = "DIFFMEGATRON_ATTEMPT"
"""Environment variable with the directory of the current attempt."""
HEARTBEAT = "heartbeat.json"
EXIT_STOPPED = 75
"""Exit status of a run that was stopped and can be resumed (EX_TEMPFAIL of sysexits.h)."""
NOT_BEGUN = "before the run had begun"
"""Text at the end of :attr:`End.reason` if a signal stopped the rank before the run had begun.

Such a rank has nothing to save.
"""
_END_NAME = re.compile(r"rank_(\d{5,7})\.json(\.tmp)?")
# Minimum seconds between two heartbeats. Steps may take milliseconds, and a write for each step
# would load the file server.
_HEARTBEAT_SECONDS = 5.0
# Minimum number of reports (see `Heartbeat`) in an attempt before a rank can count as a straggler.
_MIN_REPORTS = 10


class End(Section):
    """Record of how one rank ended.

    Attributes:
        status: exit status; 128 + N if signal N killed the rank.
        reason: one sentence; empty after success, or if the rank could not write it.
        step: last step that the rank reached; None: no step, or unknown.
        time: time of the end in seconds since 1970, by the host's clock.
    """

    status: int
    reason: str = ""
    step: int | None = None
    host: str = ""
    time: float = 0.0


class Heartbeat(Section):
    """Training progress that rank 0 writes every few seconds.

    Reports on slow ranks compare the times that the ranks spent on their own work since the
    previous report.

    Attributes:
        time: time of writing in seconds since 1970.
        step: last step reached.
        run_dir: folder of the run, or of the current stage.
        first_step: step at which the attempt began this run or stage.
        reports: number of reports in this attempt.
        slow: rank -> number of reports in which the rank was much slower than most ranks.
    """

    time: float
    step: int
    run_dir: str
    first_step: int
    reports: int = 0
    slow: dict[int, int] = Field(default_factory=dict)

    @property
    def stragglers(self) -> list[int]:
        """Ranks that were slow in more than half of the reports; empty before ten reports."""
        if self.reports < _MIN_REPORTS:
            return []
        return [rank for rank, count in self.slow.items() if 2 * count > self.reports]


class RankRecord:
    """Writer of a rank's end and, on rank 0, of the heartbeat.

    Use this class as a context manager around all work of the rank.

    Args:
        folder: directory of the attempt; None: nothing is written.
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
        """Create the record of this process from ``DIFFMEGATRON_ATTEMPT`` and ``RANK``.

        If one of these environment variables is missing, the record writes nothing.
        """
        folder, rank = os.environ.get(ATTEMPT), os.environ.get("RANK", "")
        return cls(Path(folder), int(rank)) if folder and rank.isdecimal() else cls()

    def set_step(self, step: int, run_dir: str) -> None:
        """Record that the run has reached a step.

        Rank 0 writes a heartbeat at most every five seconds, or earlier if ``run_dir`` has changed.
        """
        self._step = step
        if self._start is None or self._start[0] != run_dir:
            self._start, self._last_heartbeat = (run_dir, step), 0.0
        now = time.time()
        if (
            self.folder is None
            or self._rank != 0
            or now - self._last_heartbeat < _HEARTBEAT_SECONDS
        ):
            return
        self._last_heartbeat = now
        self._write_heartbeat(now)

    def add_report(self, slow_ranks: Collection[int]) -> None:
        """Count one report (see :class:`Heartbeat`), and the ranks that were slow in it."""
        self._reports += 1
        self._slow.update(slow_ranks)

    def _write_heartbeat(self, now: float) -> None:
        assert self.folder is not None and self._step is not None and self._start is not None
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
        """Write the end of this rank; rank 0 also writes a last heartbeat if it reached a step."""
        if self.folder is None:
            return
        now = time.time()
        if self._rank == 0 and self._step is not None:
            self._write_heartbeat(now)
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        end = End(status=status, reason=shorten(reason), step=self._step, host=host, time=now)
        self._write(end_name(self._rank), end)

    def _write(self, name: str, content: Section) -> None:
        assert self.folder is not None
        try:
            write_durably(self.folder / name, content.model_dump_json().encode())
        except OSError as error:  # A failed write must not end the run.
            log.warning("cannot write %s: %s", format_path(self.folder / name), error)

    @contextmanager
    def write_failures(self) -> Iterator[None]:
        """Write the end of this rank if the ``with`` block raises; otherwise write nothing.

        The preflight checks use this context in a separate process before training. If the checks
        succeed, the training process writes the end of the rank later.
        """
        try:
            yield
        except BaseException as error:
            self.end(*_status_of(error))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end(*_status_of(error))


def _status_of(error: BaseException | None) -> tuple[int, str]:
    """Return the exit status and the reason of :class:`End` for an exception or None."""
    if error is None:
        return 0, ""
    if isinstance(error, UserError):
        return error.exit_status, str(error)
    code = getattr(error, "exit_code", None)  # typer.Exit has this attribute.
    if isinstance(code, int):
        return code, ""
    return 1, f"{type(error).__name__}: {error}"


def end_name(rank: int) -> str:
    """Return the name of the file that records how a rank ended."""
    return f"rank_{rank:05d}.json"


def read_ends(folder: Path) -> dict[int, End]:
    """Read the recorded end of each rank from the directory of an attempt.

    A damaged file is skipped with a warning. If the final file of a rank is missing or damaged, the
    temporary file of the rank (suffix ``.tmp``) is read. A rank that is killed before it renames
    the temporary file leaves no final file.

    Raises:
        UserError: the directory cannot be read.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot read {format_path(folder)}: {error.strerror}") from None
    ends: dict[int, End] = {}
    # In sorted order, the final file of a rank precedes the temporary file of the same rank.
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
