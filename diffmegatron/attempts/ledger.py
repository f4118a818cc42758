"""Ledger of a job: one entry for each attempt (start of the job's ranks) in ``run_dir/attempts``.

The entry ``NNNN.json`` is written when attempt NNNN begins, and again when it ends. ``NNNN/`` is
the attempt's directory, in which every rank records how it ended. If the job was killed before it
wrote the end of an attempt, the next attempt determines this end from the files and writes it.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from diffmegatron.attempts.decision import Cause, Decision, decide
from diffmegatron.attempts.ends import Heartbeat, read_ends, read_heartbeat
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, os_error_text, read_json, shorten, write_durably
from diffmegatron.section import Section

log = logging.getLogger(__name__)

ATTEMPTS = "attempts"
MAX_FAULTS = 10
"""Number of faults in a row, without a new checkpoint between them, after which a job ends."""
# Number of latest attempts that are examined for faults and slow ranks of hosts.
_RECENT_ATTEMPTS = 10
# The job avoids a host that had a fault or a slow rank in at least this many of the last attempts.
# One attempt is not enough, because the cause of a single fault may be elsewhere.
_MAX_HOST_FAULTS = 2
_NAME = re.compile(r"(\d{4,6})\.json")


class Facts(Section):
    """Facts about an attempt that are known when it begins.

    Attributes:
        job: Slurm job ID.
        nodes: host names in the order of the ranks.
        versions: name of this package and of each library -> its version.
        commit: git commit of this package; None: not a git checkout.
    """

    job: str
    nodes: tuple[str, ...]
    ranks: int
    versions: dict[str, str]
    commit: str | None = None


class Attempt(Section):
    """One entry of the ledger: the record of one start of the job's ranks.

    A recipe can describe several stages, which are trained one after the other. Without stages, the
    whole run is the only stage.

    Attributes:
        number: number of the attempt, counted from 1.
        stages: ``run_dir`` of each stage -> total number of its steps; empty: no recipe could be
            read yet.
        startup_seconds: watchdog timeout of the first step; the largest value of all stages.
        step_seconds: watchdog timeout of every other step; the largest value of all stages.
        began: time of the beginning in seconds since 1970.
        saved_at_start: saved progress at the beginning: the step of the newest checkpoint, summed
            over the stages.
        checkpoint: path of the newest checkpoint at the beginning; None: no checkpoint.
        ended: time of the end in seconds since 1970; None: not ended, or not recorded yet.
        cause: cause of the end; None: not ended, or not recorded yet.
        reason: one sentence about the end.
        hosts: hosts that are blamed for a fault or for lost ranks.
        unfit: hosts among ``hosts`` that failed the preflight checks.
        stragglers: hosts of slow ranks (``Heartbeat.stragglers``).
        first_step, last_step: first and last step of the attempt in the last stage that it trained;
            None: unknown.
        saved: saved progress at the end, computed like ``saved_at_start``.
        faults: number of faults in a row without a new checkpoint between them, including this
            attempt.
    """

    number: int
    facts: Facts
    stages: dict[str, int]
    startup_seconds: float
    step_seconds: float
    began: float
    saved_at_start: int
    checkpoint: str | None
    ended: float | None = None
    cause: Cause | None = None
    reason: str = ""
    hosts: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()
    stragglers: tuple[str, ...] = ()
    first_step: int | None = None
    last_step: int | None = None
    saved: int = 0
    faults: int = 0

    @property
    def seconds(self) -> float:
        """Duration of the attempt in seconds, up to now if it has not ended."""
        return (self.ended or time.time()) - self.began

    @property
    def has_trained(self) -> bool:
        """True if ``last_step`` is greater than ``first_step``."""
        return (self.last_step or 0) > (self.first_step or 0)

    @property
    def is_over(self) -> bool:
        """True if the job ends with this attempt and is not requeued."""
        if self.cause == Cause.FAULT:
            return self.faults >= MAX_FAULTS
        return self.cause in (Cause.FINISHED, Cause.MISTAKE)

    def host_of(self, rank: int) -> str:
        """Return the host name of a rank, or an empty string if it is unknown.

        The function assumes that ranks fill the nodes in order, which is Slurm's default.
        """
        per_node = -(-self.facts.ranks // max(1, len(self.facts.nodes)))
        index = rank // per_node
        return self.facts.nodes[index] if index < len(self.facts.nodes) else ""

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the sorted host names of the nodes of some ranks."""
        return tuple(sorted({self.host_of(rank) for rank in ranks} - {""}))


class Ledger:
    """Ledger of one job: the entries of all its attempts, stored in ``run_dir/attempts``.

    Args:
        run_dir: ``run_dir`` of the recipe; for a recipe with stages, the common parent folder of
            the stages.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / ATTEMPTS

    def folder(self, number: int) -> Path:
        """Return the path of an attempt's directory."""
        return self.directory / f"{number:04d}"

    def attempts(self) -> list[Attempt]:
        """Read all entries, oldest first. A damaged entry is skipped with a warning.

        Raises:
            UserError: the folder exists and cannot be read.
        """
        try:
            names = sorted(path.name for path in self.directory.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"cannot read {format_path(self.directory)}: {os_error_text(error)}"
            ) from None
        found = []
        for name in filter(_NAME.fullmatch, names):
            try:
                found.append(read_json(self.directory / name, Attempt))
            except UserError as error:
                log.warning("skipped: %s", error)
        return sorted(found, key=lambda attempt: attempt.number)

    def begin(self, recipes: Sequence[Recipe], facts: Facts) -> Attempt:
        """Create the entry and the directory of a new attempt.

        First write the ends of earlier attempts that were killed with their job. ``recipes``
        contains one recipe per stage.

        Raises:
            UserError: the ledger cannot be read or written.
        """
        before = self._end_killed()
        stages = {recipe.run_dir: recipe.training.total_steps for recipe in recipes}
        saved, checkpoint = _saved(stages)
        try:
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
        except OSError as error:
            raise UserError(
                f"cannot write in {format_path(self.directory)}: {os_error_text(error)}"
            ) from None
        return attempt

    def record_mistake(self, facts: Facts, why: str) -> None:
        """Write the entry of an attempt that a user's mistake ended before any rank started.

        The recipe may be unreadable, so the values of the entry that depend on the recipe are
        copied from the previous attempt. If the entry cannot be written, a warning is logged.
        """
        try:
            before = self._end_killed()
            last = before[-1] if before else None
            now = time.time()
            attempt = Attempt(
                number=self._new_folder(),
                facts=facts,
                stages={} if last is None else last.stages,
                startup_seconds=0.0 if last is None else last.startup_seconds,
                step_seconds=0.0 if last is None else last.step_seconds,
                began=now,
                saved_at_start=0 if last is None else last.saved,
                checkpoint=None if last is None else last.checkpoint,
                ended=now,
                cause=Cause.MISTAKE,
                reason=shorten(why),
                saved=0 if last is None else last.saved,
                faults=0 if last is None else last.faults,
            )
            self._write(attempt)
        except (OSError, UserError) as error:  # Do not hide the user's mistake by this error.
            log.warning("cannot write in %s: %s", format_path(self.directory), error)

    def end(self, attempt: Attempt, *, was_killed: bool = False) -> Attempt:
        """Determine the cause of an attempt's end; write the attempt's entry, and return the entry.

        If the entry cannot be written, a warning is logged.

        Args:
            attempt: an attempt that has begun.
            was_killed: whether the attempt was killed with its job.

        Raises:
            UserError: the attempt's directory cannot be read.
        """
        folder = self.folder(attempt.number)
        ends = read_ends(folder)
        decision = decide(ends, attempt.facts.ranks, attempt.host_of, was_killed=was_killed)
        heartbeat = read_heartbeat(folder)
        last = max((end.time for end in ends.values()), default=attempt.began)
        if heartbeat is not None:
            last = max(last, heartbeat.time)
        ended = self._ended(attempt, decision, heartbeat, last if was_killed else time.time())
        try:
            self._write(ended)
        except OSError as error:  # Continue: the job can be requeued without the entry.
            log.warning("cannot write in %s: %s", format_path(self.directory), os_error_text(error))
        return ended

    def _ended(
        self, attempt: Attempt, decision: Decision, heartbeat: Heartbeat | None, when: float
    ) -> Attempt:
        before = [each for each in self.attempts() if each.number < attempt.number]
        faults = before[-1].faults if before else 0
        saved, _ = _saved(attempt.stages)
        if saved > max((each.saved for each in before), default=0):
            faults = 0
        changes = {
            "ended": when,
            "cause": decision.cause,
            "reason": decision.reason,
            "hosts": decision.hosts,
            "unfit": decision.unfit,
            "saved": saved,
            "faults": faults + (decision.cause == Cause.FAULT),
        }
        if heartbeat is not None:
            changes |= {
                "first_step": heartbeat.first_step,
                "last_step": heartbeat.step,
                "stragglers": attempt.hosts_of(heartbeat.stragglers),
            }
        return attempt.model_copy(update=changes)

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
    """Return the number of recent attempts in which each host was blamed or had a slow rank.

    The last ten attempts are examined. Hosts with the number 0 are absent. The host with the
    largest number comes first.
    """
    recent = attempts[-_RECENT_ATTEMPTS:]
    named = [host for each in recent for host in {*each.hosts, *each.stragglers}]
    return dict(Counter(sorted(named)).most_common())


def bad_hosts(attempts: Sequence[Attempt]) -> list[str]:
    """Return the hosts that the next attempt must avoid.

    Such a host failed the preflight checks of the last attempt, or in at least two of the last ten
    attempts it was blamed for the end or had a slow rank.
    """
    unfit = set(attempts[-1].unfit) if attempts else set()
    faulty = {host for host, count in suspects(attempts).items() if count >= _MAX_HOST_FAULTS}
    return sorted(unfit | faulty)


def ledger_of(recipes: Sequence[Recipe]) -> Ledger:
    """Return the ledger of a run: in its ``run_dir``, or in the parent folder of its stages."""
    first = Path(recipes[0].run_dir)
    return Ledger(first if len(recipes) == 1 else first.parent)


def _saved(run_dirs: Iterable[str]) -> tuple[int, Path | None]:
    """Return the saved progress of a run, and the path of its newest checkpoint.

    The saved progress is the step of the newest checkpoint, summed over the stages. The newest
    checkpoint of the run is in the last stage that has a checkpoint. The path is None if no stage
    has a checkpoint.

    Args:
        run_dirs: ``run_dir`` of each stage, in the order of the stages.
    """
    total, newest = 0, None
    for run_dir in run_dirs:
        store = CheckpointStore(Path(run_dir))
        if steps := store.complete():
            total, newest = total + steps[-1], store.path(steps[-1])
    return total, newest
