"""The ledger of a job: one entry for each attempt (start of the job) in ``run_dir/attempts``.

``NNNN.json`` is written when an attempt begins and again when it ends. ``NNNN/`` is the attempt's
directory, in which every rank records its end. The second version of ``NNNN.json`` is computed from
files only, so that the next attempt can write it if the job was killed.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from diffmegatron.attempts.decision import Cause, Decision, decide
from diffmegatron.attempts.ends import Heartbeat, read_ends, read_heartbeat
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_json, reason, shown, write_durably
from diffmegatron.section import Section

log = logging.getLogger(__name__)

ATTEMPTS = "attempts"
MAX_FAULTS = 10
"""Number of faults in a row, without a new checkpoint between them, after which a job ends."""
# Number of recent attempts in which a host's faults and slow ranks are counted.
_RECENT_ATTEMPTS = 10
# Number of faults after which a host is avoided. A single fault may have any cause.
_MAX_HOST_FAULTS = 2
_NAME = re.compile(r"(\d{4,6})\.json")


class Facts(Section):
    """Facts about an attempt that are known when it begins.

    Attributes:
        job: Slurm's number of the job.
        nodes: host names in the order of the ranks.
        ranks: number of ranks.
        versions: versions of this package and its libraries.
        commit: git commit of this package; None: not a git checkout.
    """

    job: str
    nodes: tuple[str, ...]
    ranks: int
    versions: dict[str, str]
    commit: str | None = None


class Attempt(Section):
    """One entry of the ledger.

    Attributes:
        number: number of the attempt, from 1.
        facts: facts known at the beginning.
        stages: last step of each stage, by its ``run_dir``; empty: no recipe could be read yet.
        startup_seconds: time that the run's watchdog waits for the first step.
        step_seconds: time that the watchdog waits for every other step.
        began: seconds since 1970.
        saved_at_start: sum over stages of the newest checkpoint's step, at the beginning.
        checkpoint: newest checkpoint at the beginning; None: none.
        ended: seconds since 1970; None: not ended, or the end is not recorded yet.
        cause: cause of the end.
        reason: one sentence about the end.
        hosts: hosts of the ranks that caused a fault.
        unfit: hosts among ``hosts`` that failed the preflight checks.
        stragglers: hosts of ranks that were much slower than most other ranks, in more than half
            of the reports.
        first_step: first step of the attempt in its last stage.
        last_step: last step of the attempt in its last stage.
        saved: sum over stages of the newest checkpoint's step, at the end.
        faults: number of faults in a row without a new checkpoint, including this one.
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
        """Duration until the end, or until the present."""
        return (self.ended or time.time()) - self.began

    @property
    def has_trained(self) -> bool:
        """True if the attempt went beyond its first step."""
        return (self.last_step or 0) > (self.first_step or 0)

    @property
    def is_over(self) -> bool:
        """True if the job has ended, so that no attempt follows."""
        if self.cause == Cause.FAULT:
            return self.faults >= MAX_FAULTS
        return self.cause in (Cause.FINISHED, Cause.MISTAKE)

    def host_of(self, rank: int) -> str:
        """Return the node of a rank. Slurm places ranks node by node by default."""
        per_node = -(-self.facts.ranks // max(1, len(self.facts.nodes)))
        index = rank // per_node
        return self.facts.nodes[index] if index < len(self.facts.nodes) else ""

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the nodes of some ranks, sorted."""
        return tuple(sorted({self.host_of(rank) for rank in ranks} - {""}))


class Ledger:
    """The ledger of one job.

    Args:
        run_dir: ``run_dir`` of the recipe; for a recipe with stages, their common parent folder.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / ATTEMPTS

    def folder(self, number: int) -> Path:
        """Return the directory of an attempt."""
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
            raise UserError(f"cannot read {shown(self.directory)}: {reason(error)}") from None
        found = []
        for name in filter(_NAME.fullmatch, names):
            try:
                found.append(read_json(self.directory / name, Attempt))
            except UserError as error:
                log.warning("skipped: %s", error)
        return sorted(found, key=lambda attempt: attempt.number)

    def begin(self, recipes: Sequence[Recipe], facts: Facts) -> Attempt:
        """Record the end of attempts that were killed with their job, then write a new attempt.

        Raises:
            UserError: the ledger cannot be written.
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
            raise UserError(f"cannot write in {shown(self.directory)}: {reason(error)}") from None
        return attempt

    def refuse(self, facts: Facts, why: str) -> None:
        """Write an attempt that a mistake ended before any rank started.

        The recipe may be unreadable, so its values are copied from the previous attempt. An attempt
        that cannot be written causes only a warning.

        Args:
            facts: facts about the attempt.
            why: sentence about the mistake.
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
                reason=clipped(why),
                saved=0 if last is None else last.saved,
                faults=0 if last is None else last.faults,
            )
            self._write(attempt)
        except (OSError, UserError) as error:  # the caller still raises the mistake itself
            log.warning("cannot write in %s: %s", shown(self.directory), error)

    def end(self, attempt: Attempt, *, was_killed: bool = False) -> Attempt:
        """Determine from the recorded ends of its ranks why an attempt ended, and write the result.

        A result that cannot be written causes only a warning.

        Args:
            attempt: an attempt that has begun.
            was_killed: whether it was killed with its job, so that ends may be missing.

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
        except OSError as error:  # the job can be requeued without the entry
            log.warning("cannot write in %s: %s", shown(self.directory), reason(error))
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
        """End the attempts that were killed with their job, and return all attempts."""
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
    """Return the number of recent attempts in which each host caused a fault or was slow."""
    recent = attempts[-_RECENT_ATTEMPTS:]
    named = [host for each in recent for host in {*each.hosts, *each.stragglers}]
    return dict(Counter(sorted(named)).most_common())


def bad_hosts(attempts: Sequence[Attempt]) -> list[str]:
    """Return the hosts that the next attempt must avoid.

    These were unfit in the last attempt, or suspects in at least two recent ones.
    """
    unfit = set(attempts[-1].unfit) if attempts else set()
    faulty = {host for host, count in suspects(attempts).items() if count >= _MAX_HOST_FAULTS}
    return sorted(unfit | faulty)


def ledger_of(recipes: Sequence[Recipe]) -> Ledger:
    """Return the ledger in the recipe's ``run_dir``, or in the parent folder of its stages."""
    first = Path(recipes[0].run_dir)
    return Ledger(first if len(recipes) == 1 else first.parent)


def _saved(stages: Mapping[str, int]) -> tuple[int, Path | None]:
    """Return the sum over stages of the newest checkpoint's step, and the newest checkpoint."""
    total, newest = 0, None
    for run_dir in stages:
        store = CheckpointStore(Path(run_dir))
        if steps := store.complete():
            total, newest = total + steps[-1], store.path(steps[-1])
    return total, newest
