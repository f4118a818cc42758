"""Whether a job is requeued or ended, from how its ranks ended and from nothing else.

srun's own status is of no use: it ends with that of one rank, and ends the others by a signal of
its own as soon as one has failed.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from diffmegatron.attempts.ends import EXIT_STOPPED, NOT_BEGUN, End
from diffmegatron.errors import MachineError, UnfitNodeError, UserError

_SIGNAL = 128
# What people, Slurm and srun end a rank with that has no handler yet: asked to stop, no fault.
_ASKED = {_SIGNAL + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
_SHOWN_RANKS = 8


class Cause(StrEnum):
    """Why an attempt ended, and so what is next."""

    FINISHED = "finished"
    """All steps are done: the job ends."""
    MISTAKE = "mistake"
    """For a person to look at: the job ends."""
    STOPPED = "stopped"
    """Asked to stop, by a signal or the time limit: requeued, never counted."""
    FAULT = "fault"
    """A crash, a hang, ranks that did not arrive: requeued, and counted."""
    LOST = "lost"
    """Ended with its job, from outside (node failure, preemption, cancelled): never counted."""


@dataclass(frozen=True)
class Decision:
    """What an attempt ended by.

    Attributes:
        cause: the kind.
        reason: in one sentence.
        hosts: of the ranks that are to blame, where that can be told.
        unfit: those of them that are known to be no good, by the checks before the run.
    """

    cause: Cause
    reason: str
    hosts: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


def decide(
    ends: Mapping[int, End], ranks: int, host_of: Callable[[int], str], *, was_killed: bool = False
) -> Decision:
    """The one decision about an attempt.

    Args:
        ends: of those ranks that left one.
        ranks: how many there were.
        host_of: the host of a rank without an end.
        was_killed: the job ended before its ranks, so that a rank without an end is no fault
            of its own.

    In this order: a mistake of any rank is one, whatever it did to the others; a rank that says 75
    has saved together with all others, so that nothing after it matters, or had nothing to save,
    which is no answer where another has crashed; a node that is not fit is
    a fault, and so is a rank that failed of itself, or that left no end; of a job that was killed
    only a rank that a signal of the kernel's ended is one, as others fail when their peers are
    lost; ranks that a signal ended before they could save were asked to stop.
    """
    if was_killed:  # and its ranks with it, some of whose shells outlived them by a moment
        ends = _with(ends, lambda end: end.status != _SIGNAL + signal.SIGKILL)
    mistakes = _with(ends, lambda end: end.status == UserError.exit_status)
    if mistakes:
        return Decision(Cause.MISTAKE, _said(mistakes, "a mistake that it could not say"))
    stopped = _with(ends, lambda end: end.status == EXIT_STOPPED)
    saved = _with(stopped, lambda end: not end.reason.endswith(NOT_BEGUN))
    crashed = _with(ends, lambda end: end.status > _SIGNAL and end.status not in _ASKED)
    # srun tells the others to stop when a rank is killed, also those that have not begun.
    if saved or (stopped and not crashed):
        reasons = sorted({end.reason for end in stopped.values() if end.reason})
        return Decision(Cause.STOPPED, reasons[0] if reasons else "asked to stop, and saved")
    unfit = _with(ends, lambda end: end.status == UnfitNodeError.exit_status)
    if unfit:
        hosts = _hosts(unfit)
        return Decision(Cause.FAULT, _said(unfit, "its node is not fit"), hosts, hosts)
    missing = [rank for rank in range(ranks) if rank not in ends]
    absent = tuple(sorted({host_of(rank) for rank in missing} - {""}))
    failed = _with(ends, lambda end: end.status not in {0, EXIT_STOPPED, *_ASKED})
    if was_killed and missing and not _with(failed, lambda end: end.status > _SIGNAL):
        # Of a node that dies with its job the ranks of the others notice, and fail.
        reason = f"the job ended before {_named(missing)}"
        return Decision(Cause.LOST, reason, absent if failed and 2 * len(missing) <= ranks else ())
    unmet = _with(failed, lambda end: end.status == MachineError.exit_status)
    if unmet and unmet == failed:
        # Who says so was there; who is not has left nothing.
        return Decision(Cause.FAULT, _said(unmet, ""), absent if 2 * len(missing) <= ranks else ())
    if failed:
        failed = {rank: failed[rank] for rank in failed if rank not in unmet}
        if missing and 2 * len(missing) <= ranks and _only_waited(failed, set(absent)):
            reason = f"{_named(missing)} left no exit status, and the others waited: lost or frozen"
            return Decision(Cause.FAULT, reason, absent)
        return _fault(failed, ranks)
    if missing:
        reason = f"{_named(missing)} left no exit status: it was killed, or the node was lost"
        return Decision(Cause.FAULT, reason, absent if len(missing) < ranks else ())
    asked = _with(ends, lambda end: end.status in _ASKED)
    if asked:
        name = signal.Signals(next(iter(asked.values())).status - _SIGNAL).name
        return Decision(Cause.STOPPED, f"{name} ended {_named(list(asked))} before a step")
    return Decision(Cause.FINISHED, "all steps are done")


def _only_waited(failed: Mapping[int, End], absent: set[str]) -> bool:
    """Whether ranks failed because of others, which left no end.

    All that waited ended by the watchdog, whose clock does not run in a rank that is frozen; or
    they noticed, on their nodes, that of other nodes no rank was there any more.
    """
    if any(end.status > _SIGNAL for end in failed.values()):
        return False
    hung = all(not end.reason for end in failed.values())
    return hung or absent.isdisjoint(end.host for end in failed.values())


def _fault(failed: Mapping[int, End], ranks: int) -> Decision:
    """Who failed first is to blame; the others failed because it had ended.

    A rank that a signal ended (SIGKILL of the kernel out of memory, SIGSEGV) comes before one that
    could say nothing (the watchdog's), and that before one that raised an error.
    """

    def order(rank: int) -> tuple[int, float]:
        end = failed[rank]
        return (0 if end.status > _SIGNAL else 2 if end.reason else 1), end.time

    first = min(failed, key=order)
    kind = order(first)[0]
    alike = [rank for rank in failed if order(rank)[0] == kind]
    if kind == 2:
        alike = [first]
    hosts = _hosts({rank: failed[rank] for rank in alike})
    # Where most ranks ended alike none of them is to blame: all waited for something.
    blamed = hosts if 2 * len(alike) <= ranks or ranks == 1 else ()
    return Decision(Cause.FAULT, _said({first: failed[first]}, _silent(failed[first])), blamed)


def _silent(end: End) -> str:
    if end.status > _SIGNAL:
        number = end.status - _SIGNAL
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"
    return f"ended with status {end.status} and could not say why, as the watchdog ends a hung rank"


def _with(ends: Mapping[int, End], holds: Callable[[End], bool]) -> dict[int, End]:
    return {rank: ends[rank] for rank in sorted(ends) if holds(ends[rank])}


def _hosts(ends: Mapping[int, End]) -> tuple[str, ...]:
    return tuple(sorted({end.host for end in ends.values()} - {""}))


def _said(ends: Mapping[int, End], otherwise: str) -> str:
    """The sentence of the first rank that has one."""
    rank = next((rank for rank, end in ends.items() if end.reason), next(iter(ends)))
    end = ends[rank]
    host = f" on {end.host}" if end.host else ""
    return f"rank {rank}{host}: {end.reason or otherwise}"


def _named(ranks: list[int]) -> str:
    more = len(ranks) - _SHOWN_RANKS
    names = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {names}"
