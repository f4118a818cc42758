"""Ledger of a job: one JSON entry for each attempt (one start of the job's ranks).

The entry of attempt NNNN is ``run_dir/attempts/NNNN.json``. Each rank of the attempt records its
end in the folder ``run_dir/attempts/NNNN``. If the job is killed during an attempt, the next
attempt completes the killed attempt's entry.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diffmegatron.attempts.decision import Cause, Decision, decide
from diffmegatron.attempts.ends import read_ends, read_heartbeat
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import (
    explain_os_errors,
    format_path,
    os_error_text,
    read_json,
    shorten,
    write_durably,
)
from diffmegatron.section import Section

log = logging.getLogger(__name__)

ATTEMPTS = "attempts"
# File that launch/slurm.sh writes in an attempt's directory when the job reaches its time limit.
_TIME_LIMIT = "time_limit"
MAX_FAULTS = 10
"""Number of faults without a new checkpoint between them after which a job ends."""
_RECENT_ATTEMPTS = 10
# A host is avoided if it was blamed or slow in this many recent attempts.
_MAX_HOST_FAULTS = 2
_NAME = re.compile(r"(\d{4,6})\.json")


class Facts(Section):
    """Facts about an attempt that are known when it begins."""

    job: str  # Slurm job ID
    nodes: tuple[str, ...]  # host names in the order of the ranks
    ranks: int
    versions: dict[str, str]  # package name -> version, of this package and of the libraries
    commit: str | None = None  # git commit of this package; None outside a git checkout


class Attempt(Section):
    """Entry of the ledger for one attempt, which is one start of the job's ranks.

    *Saved progress* is the sum of the steps of every stage's newest checkpoint.
    """

    number: int  # from 1
    facts: Facts
    stages: dict[str, int]  # run_dir of each stage (or of the only run) -> total number of steps
    startup_seconds: float  # largest watchdog.startup_seconds of the stages
    step_seconds: float  # largest watchdog.step_seconds of the stages
    began: float  # seconds since 1970
    saved_at_start: int  # saved progress at the beginning
    checkpoint: str | None  # path of the newest checkpoint at the beginning; None without one
    ended: float | None = None  # seconds since 1970; None until the end is recorded
    cause: Cause | None = None
    reason: str = ""
    hosts: tuple[str, ...] = ()  # hosts that probably caused the end; empty if unknown
    unfit: tuple[str, ...] = ()  # hosts that failed the preflight checks
    stragglers: tuple[str, ...] = ()  # hosts of slow ranks
    # Steps in the last stage that the attempt reached; None if no step was recorded.
    first_step: int | None = None  # step from which the stage began or resumed
    last_step: int | None = None  # last recorded step
    saved: int = 0  # saved progress at the end
    faults: int = 0  # number of faults from the last new checkpoint to the end of this attempt

    @property
    def seconds(self) -> float:
        """Duration of the attempt in seconds, up to now if it has not ended."""
        return (self.ended or time.time()) - self.began

    @property
    def has_trained(self) -> bool:
        """True if the attempt trained at least one step in the last stage that it reached.

        Steps in earlier stages do not count.
        """
        return (self.last_step or 0) > (self.first_step or 0)

    @property
    def was_stopped_early(self) -> bool:
        """True if the attempt was stopped before a new step in any stage."""
        has_progressed = self.has_trained or self.saved > self.saved_at_start
        return self.cause == Cause.STOPPED and not has_progressed

    @property
    def is_over(self) -> bool:
        """True if the job ends with this attempt and is not requeued."""
        if self.cause == Cause.FAULT:
            return self.faults >= MAX_FAULTS
        return self.cause in (Cause.FINISHED, Cause.MISTAKE)

    def host_of(self, rank: int) -> str:
        """Return the host of a rank, assuming that ranks fill the nodes in order; "" if unknown."""
        per_node = -(-self.facts.ranks // max(1, len(self.facts.nodes)))
        index = rank // per_node
        return self.facts.nodes[index] if index < len(self.facts.nodes) else ""

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the known hosts of some ranks, sorted."""
        return tuple(sorted({self.host_of(rank) for rank in ranks} - {""}))


class Ledger:
    """Ledger of one job, stored in ``run_dir/attempts``.

    For a run with stages, ``run_dir`` is the parent folder of the stages.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / ATTEMPTS

    def folder(self, number: int) -> Path:
        """Return the path of an attempt's directory."""
        return self.directory / f"{number:04d}"

    def attempts(self) -> list[Attempt]:
        """Read all entries, oldest first; skip a damaged entry with a warning."""
        with explain_os_errors(f"cannot read {format_path(self.directory)}"):
            try:
                names = sorted(path.name for path in self.directory.iterdir())
            except FileNotFoundError:
                return []
        found = []
        for name in filter(_NAME.fullmatch, names):
            try:
                found.append(read_json(self.directory / name, Attempt))
            except UserError as error:
                log.warning("skipped: %s", error)
        return sorted(found, key=lambda attempt: attempt.number)

    def begin(self, recipes: Sequence[Recipe], facts: Facts) -> Attempt:
        """Record the end of killed attempts; then create a new attempt's entry and directory.

        Raises:
            UserError: the recorded end of this job's last attempt is a mistake.
        """
        was_killed = any(each.ended is None for each in self.attempts())
        before = self._end_killed()
        if was_killed and before[-1].facts.job == facts.job and before[-1].cause == Cause.MISTAKE:
            raise UserError(before[-1].reason)
        stages = {recipe.run_dir: recipe.training.total_steps for recipe in recipes}
        saved, checkpoint = _saved(stages)
        with explain_os_errors(f"cannot write in {format_path(self.directory)}"):
            number = self._new_folder()
            attempt = Attempt(
                number=number,
                facts=facts,
                stages=stages,
                startup_seconds=max(recipe.watchdog.startup_seconds for recipe in recipes),
                step_seconds=max(recipe.watchdog.step_seconds for recipe in recipes),
                began=time.time(),
                saved_at_start=saved,
                checkpoint=None if checkpoint is None else str(checkpoint),
                faults=before[-1].faults if before else 0,
            )
            self._write(attempt)
        return attempt

    def record_mistake(self, facts: Facts, why: str) -> None:
        """Write the entry of an attempt that a user's mistake ended before any rank started.

        Values that depend on the recipe, which may be unreadable, are copied from the previous
        attempt.
        """
        copied: dict[str, Any] = {
            "stages": {},
            "startup_seconds": 0.0,
            "step_seconds": 0.0,
            "checkpoint": None,
            "saved": 0,
            "faults": 0,
        }
        try:
            if before := self._end_killed():
                copied = before[-1].model_dump(include=set(copied))
            now = time.time()
            attempt = Attempt(
                number=self._new_folder(),
                facts=facts,
                began=now,
                saved_at_start=copied["saved"],
                ended=now,
                cause=Cause.MISTAKE,
                reason=shorten(why),
                **copied,
            )
            self._write(attempt)
        except (OSError, UserError) as error:
            # Only warn: the caller still has to report the user's mistake.
            log.warning("cannot write in %s: %s", format_path(self.directory), error)

    def end(
        self, attempt: Attempt, *, was_killed: bool = False, is_job_over: bool = False
    ) -> Attempt:
        """Determine why an attempt ended; write and return its entry. A failed write is logged.

        The second attempt in a row that the end of the job has stopped before a new step is a
        mistake, because the job would be requeued forever.

        Args:
            attempt: entry of the attempt.
            was_killed: whether the attempt was killed with its job.
            is_job_over: whether the time has come at which the end of the job stops the ranks.
        """
        folder = self.folder(attempt.number)
        ends = read_ends(folder)
        decision = decide(ends, attempt.facts.ranks, attempt.host_of, was_killed=was_killed)
        if decision.cause == Cause.LOST and (folder / _TIME_LIMIT).exists():
            decision = Decision(Cause.STOPPED, "the job reached its time limit")
            is_job_over = True
        last_time = max((end.time for end in ends.values()), default=attempt.began)
        before = [each for each in self.attempts() if each.number < attempt.number]
        faults = before[-1].faults if before else 0
        saved, _ = _saved(attempt.stages)
        if saved > max((each.saved for each in before), default=0):
            faults = 0
        changes: dict[str, Any] = {
            "cause": decision.cause,
            "reason": decision.reason,
            "hosts": decision.hosts,
            "unfit": decision.unfit,
            "saved": saved,
            "faults": faults + (decision.cause == Cause.FAULT),
        }
        if heartbeat := read_heartbeat(folder):
            last_time = max(last_time, heartbeat.time)
            changes |= {
                "first_step": heartbeat.first_step,
                "last_step": heartbeat.step,
                "stragglers": attempt.hosts_of(heartbeat.stragglers),
            }
        changes["ended"] = last_time if was_killed else time.time()
        ended = attempt.model_copy(update=changes)
        last_two = [*before[-1:], ended]
        is_repeated = len(last_two) == 2 and last_two[0].facts.job == attempt.facts.job
        if is_job_over and is_repeated and all(each.was_stopped_early for each in last_two):
            reason = (
                f"job {ended.facts.job} has been stopped by its time limit twice before a new step "
                f"({ended.reason}); give it a longer --time, or less time in --signal"
            )
            ended = ended.model_copy(update={"cause": Cause.MISTAKE, "reason": reason})
        try:
            self._write(ended)
        except OSError as error:  # Only warn: a requeue does not need this entry.
            log.warning("cannot write in %s: %s", format_path(self.directory), os_error_text(error))
        return ended

    def _end_killed(self) -> list[Attempt]:
        """Record the end of attempts that were killed with their job, and return all attempts."""
        for earlier in self.attempts():
            if earlier.ended is None:
                self.end(earlier, was_killed=True)
        return self.attempts()

    def _new_folder(self) -> int:
        self.directory.mkdir(parents=True, exist_ok=True)
        number = max((int(path.stem) for path in self.directory.glob("[0-9]*")), default=0) + 1
        self.folder(number).mkdir()
        return number

    def _write(self, attempt: Attempt) -> None:
        path = self.directory / f"{attempt.number:04d}.json"
        write_durably(path, attempt.model_dump_json(indent=1).encode() + b"\n")


def suspects(attempts: Sequence[Attempt]) -> dict[str, int]:
    """Count for each host the attempts, among the last ten, in which it was blamed or slow.

    The host with the largest count comes first. Hosts without such an attempt are left out.
    """
    recent = attempts[-_RECENT_ATTEMPTS:]
    named = [host for each in recent for host in {*each.hosts, *each.stragglers}]
    return dict(Counter(sorted(named)).most_common())


def bad_hosts(attempts: Sequence[Attempt]) -> list[str]:
    """Return the hosts to avoid, sorted.

    A host is avoided if it failed the preflight checks of the last attempt, or if it was blamed or
    slow in at least two of the last ten attempts.
    """
    unfit = set(attempts[-1].unfit) if attempts else set()
    faulty = {host for host, count in suspects(attempts).items() if count >= _MAX_HOST_FAULTS}
    return sorted(unfit | faulty)


def ledger_of(recipes: Sequence[Recipe]) -> Ledger:
    """Return the ledger of a run, in its ``run_dir`` or in the parent folder of its stages."""
    first = Path(recipes[0].run_dir)
    return Ledger(first if len(recipes) == 1 else first.parent)


def _saved(run_dirs: Iterable[str]) -> tuple[int, Path | None]:
    """Return the saved progress (see :class:`Attempt`) and the path of the newest checkpoint.

    The path is that of the last stage with a checkpoint; None if no stage has one.
    """
    total, newest = 0, None
    for run_dir in run_dirs:
        store = CheckpointStore(Path(run_dir))
        if steps := store.complete():
            total, newest = total + steps[-1], store.path(steps[-1])
    return total, newest
