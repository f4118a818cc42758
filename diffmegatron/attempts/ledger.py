"""Every start of a job in one folder, ``run_dir/attempts``: what it ran on and what it came to.

``NNNN.json`` is written when an attempt begins and again when it ends; ``NNNN/`` is its directory,
in which its ranks leave their ends. The second writing adds nothing that is not known from the
ends, so that the next attempt does it for one that was killed with its job.
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
"""Faults in a row, without a checkpoint between them, after which a job ends."""
# A host is as good as any other after that many attempts without it.
_REMEMBERED = 10
# One fault may be anything's.
_BAD = 2
_NAME = re.compile(r"(\d{4,6})\.json")


class Facts(Section):
    """What is known of an attempt when it begins.

    Attributes:
        job: Slurm's number of it.
        nodes: host names in the order of the ranks.
        ranks: how many there are.
        versions: of this package and of the libraries that compute.
        commit: of the code, where it runs from a git checkout.
    """

    job: str
    nodes: tuple[str, ...]
    ranks: int
    versions: dict[str, str]
    commit: str | None = None


class Attempt(Section):
    """One line of the ledger.

    Attributes:
        number: from 1.
        facts: of its beginning.
        stages: every ``run_dir`` of the recipe, and its last step; empty where no recipe could be
            read yet.
        startup_seconds: how long the run's watchdog waits for the first step.
        step_seconds: how long it waits for another one.
        began: in seconds since 1970.
        saved_at_start: steps of the newest checkpoint, of all stages together.
        checkpoint: the newest one; None: there was none.
        ended: in seconds since 1970; None: not yet, or nobody has written so.
        cause: of its end.
        reason: of it, a sentence.
        hosts: of the ranks that were to blame.
        unfit: those of them that the checks before the run found no good.
        stragglers: hosts of ranks that were much slower than most, most of the time.
        first_step: with which it began, in its last stage.
        last_step: that it reached, in its last stage.
        saved: as ``saved_at_start``, at the end.
        faults: in a row without a checkpoint between them, this one included.
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
        """From its beginning to its end, or to now."""
        return (self.ended or time.time()) - self.began

    @property
    def has_trained(self) -> bool:
        """Whether it went beyond the step that it began with."""
        return (self.last_step or 0) > (self.first_step or 0)

    @property
    def is_over(self) -> bool:
        """Whether no other attempt follows by itself."""
        if self.cause == Cause.FAULT:
            return self.faults >= MAX_FAULTS
        return self.cause in (Cause.FINISHED, Cause.MISTAKE)

    def host_of(self, rank: int) -> str:
        """The node of a rank, as Slurm lays them out unless told otherwise: node by node."""
        per_node = -(-self.facts.ranks // max(1, len(self.facts.nodes)))
        place = rank // per_node
        return self.facts.nodes[place] if place < len(self.facts.nodes) else ""

    def hosts_of(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """The nodes of some ranks."""
        return tuple(sorted({self.host_of(rank) for rank in ranks} - {""}))


class Ledger:
    """The attempts of one job.

    Args:
        run_dir: of the recipe; with stages, the folder that holds theirs.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.directory = run_dir / ATTEMPTS

    def folder(self, number: int) -> Path:
        """The directory of an attempt."""
        return self.directory / f"{number:04d}"

    def attempts(self) -> list[Attempt]:
        """All of them, oldest first; one that cannot be read is passed over with a warning.

        Raises:
            UserError: the folder is there and cannot be read.
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
                log.warning("passed over: %s", error)
        return sorted(found, key=lambda attempt: attempt.number)

    def begin(self, recipes: Sequence[Recipe], facts: Facts) -> Attempt:
        """Write a new attempt, and the ends of those before it that were killed with their job.

        Raises:
            UserError: nothing can be written in ``run_dir``.
        """
        before = self._all_ended()
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
        """Write an attempt that a mistake ended before any rank was started, where that can be.

        What is only in the recipe, which may not be readable now, is that of the attempt before.

        Args:
            facts: of the beginning.
            why: the sentence of the mistake.
        """
        try:
            before = self._all_ended()
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
        except (OSError, UserError) as error:  # the mistake is what the job ends with
            log.warning("cannot write in %s: %s", shown(self.directory), error)

    def end(self, attempt: Attempt, *, was_killed: bool = False) -> Attempt:
        """Decide what an attempt came to, and write that where it can be.

        Args:
            attempt: that has begun.
            was_killed: with its job, so that its ranks could not say how they ended.

        Raises:
            UserError: its directory cannot be read.
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
        except OSError as error:  # whether the job is requeued does not depend on it
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

    def _all_ended(self) -> list[Attempt]:
        """End the attempts that were killed with their job, and return all attempts.

        Raises:
            UserError: one cannot be read.
        """
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
    """Hosts that were to blame for a fault or slow in the last attempts, and in how many."""
    recent = attempts[-_REMEMBERED:]
    named = [host for each in recent for host in {*each.hosts, *each.stragglers}]
    return dict(Counter(sorted(named)).most_common())


def bad_hosts(attempts: Sequence[Attempt]) -> list[str]:
    """Hosts without which the next attempt shall run: unfit in the last, or a suspect twice."""
    unfit = set(attempts[-1].unfit) if attempts else set()
    twice = {host for host, count in suspects(attempts).items() if count >= _BAD}
    return sorted(unfit | twice)


def ledger_of(recipes: Sequence[Recipe]) -> Ledger:
    """That of a recipe: in its ``run_dir``, of several stages in the folder that holds theirs."""
    first = Path(recipes[0].run_dir)
    return Ledger(first if len(recipes) == 1 else first.parent)


def _saved(stages: Mapping[str, int]) -> tuple[int, Path | None]:
    """Steps of the newest checkpoint of every stage, added up, and the newest of the last one."""
    total, newest = 0, None
    for run_dir in stages:
        store = CheckpointStore(Path(run_dir))
        if steps := store.complete():
            total, newest = total + steps[-1], store.path(steps[-1])
    return total, newest
