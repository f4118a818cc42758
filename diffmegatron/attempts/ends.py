"""How each rank of an attempt ended: one small file per rank in the attempt's directory.

A rank writes its own; for one that cannot any more (SIGKILL, the watchdog) the shell around it
does (``slurm.sh``), with the status alone. A rank without a file was killed with its shell, or
with its node.
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
from diffmegatron.files import clipped, read_json, shown, write_durably
from diffmegatron.section import Section

log = logging.getLogger(__name__)

ATTEMPT = "DIFFMEGATRON_ATTEMPT"
"""The variable that tells a rank the directory of its attempt."""
HEARTBEAT = "heartbeat.json"
# EX_TEMPFAIL of sysexits.h, "try again later": the run has saved and is to be started again.
EXIT_STOPPED = 75
# How the reason ends of a rank that was asked to stop when there was nothing to save.
NOT_BEGUN = "before the run had begun"
_END_NAME = re.compile(r"rank_(\d{5,7})\.json(\.tmp)?")
# A file server should not be written at every step of milliseconds.
_BEAT_SECONDS = 5.0
# A rank is a straggler that was slow in most reports, of so many at least.
_MIN_REPORTS = 10


class End(Section):
    """The end of one rank.

    Attributes:
        status: exit status; 128 + N: killed by signal N.
        reason: a sentence; empty where nothing went wrong or nobody was left to say.
        step: that the rank had reached; None: none, or not known.
        host: of the rank.
        time: in seconds since 1970, by the host's clock.
    """

    status: int
    reason: str = ""
    step: int | None = None
    host: str = ""
    time: float = 0.0


class Heartbeat(Section):
    """Where rank 0 is, as it wrote last.

    Attributes:
        time: of the writing, in seconds since 1970.
        step: that the run has reached.
        run_dir: of the run, or of the present stage.
        first_step: with which the attempt began.
        reports: of how long the ranks' own work took.
        slow: ranks that took much longer than most, and in how many of the reports.
    """

    time: float
    step: int
    run_dir: str
    first_step: int
    reports: int = 0
    slow: dict[int, int] = Field(default_factory=dict)

    @property
    def stragglers(self) -> list[int]:
        """Ranks that were slow most of the time."""
        if self.reports < _MIN_REPORTS:
            return []
        return [rank for rank, count in self.slow.items() if 2 * count > self.reports]


class RankRecord:
    """What one rank leaves in the directory of its attempt; entered around all that it does.

    Args:
        folder: of the attempt; None: nothing is written.
        rank: of this process.
    """

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self.folder = folder
        self._rank = rank
        self._step: int | None = None
        self._first: tuple[str, int] | None = None
        self._beaten = 0.0
        self._reports, self._slow = 0, Counter[int]()

    @classmethod
    def of_environment(cls) -> Self:
        """That of this process, as the launch script says in ``DIFFMEGATRON_ATTEMPT``."""
        folder, rank = os.environ.get(ATTEMPT), os.environ.get("RANK", "")
        return cls(Path(folder), int(rank)) if folder and rank.isdecimal() else cls()

    def at(self, step: int, run_dir: str) -> None:
        """The run has reached a step; rank 0 writes so, every five seconds at most."""
        self._step = step
        if self._first is None or self._first[0] != run_dir:
            self._first, self._beaten = (run_dir, step), 0.0
        now = time.time()
        if self.folder is None or self._rank != 0 or now - self._beaten < _BEAT_SECONDS:
            return
        self._beaten = now
        self._beat(now)

    def reported(self, slow_ranks: Collection[int]) -> None:
        """Another report of how long the ranks' own work took, and who was slow in it."""
        self._reports += 1
        self._slow.update(slow_ranks)

    def _beat(self, now: float) -> None:
        assert self.folder is not None and self._step is not None and self._first is not None
        run_dir, first_step = self._first
        beat = Heartbeat(
            time=now,
            step=self._step,
            run_dir=run_dir,
            first_step=first_step,
            reports=self._reports,
            slow=dict(self._slow),
        )
        self._write(HEARTBEAT, beat)

    def end(self, status: int, reason: str = "") -> None:
        """Write how this rank ends."""
        if self.folder is None:
            return
        now = time.time()
        if self._rank == 0 and self._step is not None:
            self._beat(now)
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        end = End(status=status, reason=clipped(reason), step=self._step, host=host, time=now)
        self._write(end_name(self._rank), end)

    def _write(self, name: str, content: Section) -> None:
        assert self.folder is not None
        try:
            write_durably(self.folder / name, content.model_dump_json().encode())
        except OSError as error:  # no reason to end a run
            log.warning("cannot write %s: %s", shown(self.folder / name), error)

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Around what comes before the run: it leaves an end only if it fails."""
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
    """The exit status that an exception becomes, and the sentence of it."""
    if error is None:
        return 0, ""
    if isinstance(error, UserError):
        return error.exit_status, str(error)
    code = getattr(error, "exit_code", None)  # of typer's Exit
    if isinstance(code, int):
        return code, ""
    return 1, f"{type(error).__name__}: {error}"


def end_name(rank: int) -> str:
    """The file of a rank's end."""
    return f"rank_{rank:05d}.json"


def read_ends(folder: Path) -> dict[int, End]:
    """The ends that ranks have left in the directory of an attempt, by rank.

    A file that cannot be read counts as none: its rank has left no end that says anything. A whole
    file whose writer was killed before it gave it its name counts.

    Raises:
        UserError: the directory cannot be read.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot read {shown(folder)}: {error.strerror}") from None
    ends: dict[int, End] = {}
    # In this order a file comes before the one that was to become it.
    for name in names:
        match = _END_NAME.fullmatch(name)
        if match is None or int(match[1]) in ends:
            continue
        try:
            ends[int(match[1])] = read_json(folder / name, End)
        except UserError as error:
            log.warning("passed over: %s", error)
    return ends


def read_heartbeat(folder: Path) -> Heartbeat | None:
    """The last heartbeat of an attempt; None: no readable one."""
    try:
        heartbeat: Heartbeat = read_json(folder / HEARTBEAT, Heartbeat)
    except UserError:
        return None
    return heartbeat
