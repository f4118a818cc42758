"""Decide after an attempt (one start of a job's ranks) whether the job continues or ends.

The input is the end that each rank recorded. The exit status of srun is the status of only one
rank, so it is not used.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from diffmegatron.attempts.ends import EXIT_STOPPED, NOT_BEGUN, End
from diffmegatron.errors import MachineError, UnfitNodeError, UserError

# Signal N gives a killed process the exit status _SIGNAL + N.
_SIGNAL = 128
# A stop signal kills a rank only before the rank has installed its signal handlers. No fault.
_STOP_STATUSES = {_SIGNAL + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
_SHOWN_RANKS = 8


class Cause(StrEnum):
    """Cause of an attempt's end, which determines how the job continues."""

    FINISHED = "finished"
    """All steps are done; the job ends."""
    MISTAKE = "mistake"
    """A person must correct something; the job ends."""
    STOPPED = "stopped"
    """A signal or the time limit stopped the ranks; the job is requeued."""
    FAULT = "fault"
    """A rank crashed, hung or did not connect; the ranks restart, up to ``ledger.MAX_FAULTS``."""
    LOST = "lost"
    """The job was killed while ranks still ran (node failure, preemption, scancel); no fault."""


@dataclass(frozen=True)
class Decision:
    """Decision about an ended attempt.

    Attributes:
        reason: one sentence about the cause, for the user.
        hosts: hosts that are blamed for a fault or for lost ranks; empty if unknown.
        unfit: hosts among ``hosts`` that failed the preflight checks.
    """

    cause: Cause
    reason: str
    hosts: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


def decide(
    ends: Mapping[int, End], ranks: int, host_of: Callable[[int], str], *, was_killed: bool = False
) -> Decision:
    """Return the cause of an attempt's end, and the hosts to blame for it.

    The rules are tried in the order of the code. The first rule that applies decides.

    Args:
        ends: end of each rank that recorded one.
        ranks: number of ranks of the job.
        host_of: function that returns the host of a rank.
        was_killed: whether the job was killed before all ranks had ended.
    """
    if was_killed:
        # Slurm ends the ranks of a killed job with SIGKILL. Treat them as ranks without a record.
        ends = _select(ends, lambda end: end.status != _SIGNAL + signal.SIGKILL)
    mistakes = _select(ends, lambda end: end.status == UserError.exit_status)
    if mistakes:
        return Decision(Cause.MISTAKE, _first_reason(mistakes, "a mistake without a message"))
    stopped = _select(ends, lambda end: end.status == EXIT_STOPPED)
    saved = _select(stopped, lambda end: not end.reason.endswith(NOT_BEGUN))
    crashed = _select(ends, lambda end: end.status > _SIGNAL and end.status not in _STOP_STATUSES)
    # All ranks save together, so failures after a save do not matter. A stop before the first save
    # counts only if no rank crashed, because srun stops all other ranks after a crash.
    if saved or (stopped and not crashed):
        reasons = sorted({end.reason for end in stopped.values() if end.reason})
        return Decision(Cause.STOPPED, reasons[0] if reasons else "stopped by a signal, and saved")
    unfit = _select(ends, lambda end: end.status == UnfitNodeError.exit_status)
    if unfit:
        hosts = _hosts(unfit)
        return Decision(Cause.FAULT, _first_reason(unfit, "its node is not fit"), hosts, hosts)
    missing = [rank for rank in range(ranks) if rank not in ends]
    absent = tuple(sorted({host_of(rank) for rank in missing} - {""}))
    failed = _select(ends, lambda end: end.status not in {0, EXIT_STOPPED, *_STOP_STATUSES})
    if was_killed and missing and not _select(failed, lambda end: end.status > _SIGNAL):
        # Ranks fail when their peers are killed. Some failed ranks, and at most half missing, show
        # that a node of the missing ranks died. Otherwise the whole job was killed.
        reason = f"the job ended before {_list_ranks(missing)}"
        return Decision(Cause.LOST, reason, absent if failed and 2 * len(missing) <= ranks else ())
    unmet = _select(failed, lambda end: end.status == MachineError.exit_status)
    if unmet and unmet == failed:
        # All failed ranks waited for ranks that did not connect.
        hosts = absent if 2 * len(missing) <= ranks else ()
        return Decision(Cause.FAULT, _first_reason(unmet, "it waited for other ranks"), hosts)
    if failed:
        failed = {rank: failed[rank] for rank in failed if rank not in unmet}
        if missing and 2 * len(missing) <= ranks and _only_waited(failed, set(absent)):
            reason = (
                f"{_list_ranks(missing)} left no exit status, probably lost or frozen, and the "
                "other ranks waited"
            )
            return Decision(Cause.FAULT, reason, absent)
        return _fault(failed, ranks)
    if missing:
        reason = f"{_list_ranks(missing)} left no exit status, probably killed or on a lost node"
        return Decision(Cause.FAULT, reason, absent if len(missing) < ranks else ())
    interrupted = _select(ends, lambda end: end.status in _STOP_STATUSES)
    if interrupted:
        name = signal.Signals(next(iter(interrupted.values())).status - _SIGNAL).name
        return Decision(
            Cause.STOPPED, f"{name} ended {_list_ranks(list(interrupted))} before the first step"
        )
    return Decision(Cause.FINISHED, "all steps are done")


def _only_waited(failed: Mapping[int, End], absent: set[str]) -> bool:
    """Return whether the failed ranks probably failed only because they waited for missing ranks.

    ``absent`` contains the hosts of the missing ranks, which recorded no end.
    """
    if any(end.status > _SIGNAL for end in failed.values()):
        return False
    is_hung = all(not end.reason for end in failed.values())
    return is_hung or absent.isdisjoint(end.host for end in failed.values())


def _fault(failed: Mapping[int, End], ranks: int) -> Decision:
    """Return a fault decision whose reason comes from the failure that is nearest to the cause."""

    def order(rank: int) -> tuple[int, float]:
        end = failed[rank]
        return (0 if end.status > _SIGNAL else 2 if end.reason else 1), end.time

    first = min(failed, key=order)
    kind = order(first)[0]
    alike = [rank for rank in failed if order(rank)[0] == kind]
    if kind == 2:
        alike = [first]
    hosts = _hosts({rank: failed[rank] for rank in alike})
    # Failures of more than half of the ranks have a common cause, such as a hanging collective.
    blamed = hosts if 2 * len(alike) <= ranks or ranks == 1 else ()
    reason = _first_reason({first: failed[first]}, _describe_status(failed[first]))
    return Decision(Cause.FAULT, reason, blamed)


def _describe_status(end: End) -> str:
    if end.status > _SIGNAL:
        number = end.status - _SIGNAL
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"
    return f"ended with status {end.status} without a message, probably hung, by the watchdog"


def _select(ends: Mapping[int, End], condition: Callable[[End], bool]) -> dict[int, End]:
    return {rank: ends[rank] for rank in sorted(ends) if condition(ends[rank])}


def _hosts(ends: Mapping[int, End]) -> tuple[str, ...]:
    return tuple(sorted({end.host for end in ends.values()} - {""}))


def _first_reason(ends: Mapping[int, End], default: str) -> str:
    """Describe the first rank that recorded a reason; else the first rank, with ``default``."""
    rank = next((rank for rank, end in ends.items() if end.reason), next(iter(ends)))
    end = ends[rank]
    host = f" on {end.host}" if end.host else ""
    return f"rank {rank}{host}: {end.reason or default}"


def _list_ranks(ranks: list[int]) -> str:
    more = len(ranks) - _SHOWN_RANKS
    names = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {names}"
