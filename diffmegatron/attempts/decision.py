"""Decide after an attempt (one start of a job's ranks) whether the job continues or ends.

The decision uses the end that each rank recorded (:class:`~diffmegatron.attempts.ends.End`). The
exit status of srun is not used, because it is the status of only one rank.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from diffmegatron.attempts.ends import EXIT_STOPPED, NOT_BEGUN, End
from diffmegatron.errors import MachineError, UnfitNodeError, UserError

# A process that signal N killed has the exit status _SIGNAL + N.
_SIGNAL = 128
# Exit statuses of a rank that was killed by a stop signal of a user, Slurm or srun. A stop signal
# kills a rank only before the rank has installed its signal handlers. This is not a fault.
_STOP_STATUSES = {_SIGNAL + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
_SHOWN_RANKS = 8


class Cause(StrEnum):
    """Cause of an attempt's end, which determines how the job continues."""

    FINISHED = "finished"
    """All steps are done. The job ends."""
    MISTAKE = "mistake"
    """A person must correct something. The job ends."""
    STOPPED = "stopped"
    """A signal or the time limit stopped the ranks. The job is requeued."""
    FAULT = "fault"
    """A rank crashed, hung or did not connect. The ranks restart, at once or after a requeue.

    The job ends instead after too many faults in a row (``ledger.MAX_FAULTS``).
    """
    LOST = "lost"
    """The job was killed while ranks still ran (node failure, preemption, scancel).

    The training continues if Slurm requeues the job or the user submits it again. This does not
    count as a fault.
    """


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

    Stop signals are SIGTERM, SIGUSR1 and SIGINT. If the job was killed, a rank that SIGKILL ended
    counts as a rank that recorded no end. The first rule that applies decides:

    1. If a rank ended because of a mistake in the user's input, the cause is a mistake.
    2. Exit status 75 means that a rank was stopped and ended in an orderly way. If a rank with this
       status had saved a checkpoint, the cause is a stop. Failures after the save do not matter,
       because all ranks save together. If the ranks with status 75 had nothing to save yet, the
       cause is also a stop, unless a signal other than a stop signal killed a rank.
    3. If a rank failed the preflight checks of its node, the cause is a fault of this node.
    4. If the job was killed and a rank recorded no end, the attempt is lost, unless a signal other
       than a stop signal killed another rank. Other failures are ignored here, because ranks fail
       when their peers are killed.
    5. If a rank recorded no end, or failed without a stop signal, the cause is a fault.
    6. If a stop signal killed a rank, the cause is a stop.
    7. Otherwise all ranks ended with status 0, and the job is finished.

    Args:
        ends: recorded ends; a rank that recorded no end is absent.
        host_of: function that returns the host of a rank; used for ranks that recorded no end.
        was_killed: whether the job was killed before all ranks had ended.
    """
    if was_killed:
        # Slurm ends the ranks of a killed job with SIGKILL. If the shell of a rank ends later, the
        # shell records the status 128 + SIGKILL. Ignore these records: they show no fault.
        ends = _select(ends, lambda end: end.status != _SIGNAL + signal.SIGKILL)
    mistakes = _select(ends, lambda end: end.status == UserError.exit_status)
    if mistakes:
        return Decision(Cause.MISTAKE, _first_reason(mistakes, "a mistake without a message"))
    stopped = _select(ends, lambda end: end.status == EXIT_STOPPED)
    saved = _select(stopped, lambda end: not end.reason.endswith(NOT_BEGUN))
    crashed = _select(ends, lambda end: end.status > _SIGNAL and end.status not in _STOP_STATUSES)
    # After a crash srun stops all other ranks. If they saved nothing, their stop is only a
    # consequence of the crash.
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
        # If a rank recorded a failure, the node of the missing ranks probably died, which made the
        # other ranks fail. So blame the hosts of the missing ranks. Blame no host if no rank
        # recorded a failure, or if more than half of the ranks are missing.
        reason = f"the job ended before {_list_ranks(missing)}"
        return Decision(Cause.LOST, reason, absent if failed and 2 * len(missing) <= ranks else ())
    unmet = _select(failed, lambda end: end.status == MachineError.exit_status)
    if unmet and unmet == failed:
        # All failed ranks waited for ranks that did not connect. Blame the hosts of the missing
        # ranks, unless more than half of the ranks are missing.
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

    A missing rank recorded no end. ``absent`` contains the hosts of the missing ranks.

    If a signal killed a failed rank, the result is False. Otherwise it is True in two cases:

    - No failed rank recorded a reason. The watchdog then ended all failed ranks. The watchdog of a
      frozen rank does not run, so the frozen rank is among the missing ranks.
    - No failed rank ran on the host of a missing rank.
    """
    if any(end.status > _SIGNAL for end in failed.values()):
        return False
    is_hung = all(not end.reason for end in failed.values())
    return is_hung or absent.isdisjoint(end.host for end in failed.values())


def _fault(failed: Mapping[int, End], ranks: int) -> Decision:
    """Return the decision that the attempt ended by a fault, with its reason and hosts to blame.

    There are three kinds of failure. A kind that is listed earlier is nearer to the cause:

    1. A signal killed the rank (SIGSEGV, or SIGKILL from the kernel when memory is full).
    2. The watchdog ended the rank, so the rank left no error message.
    3. The rank raised an error.

    Only ranks with the first kind that occurred are considered. The reason comes from the rank that
    failed earliest among them. For kinds 1 and 2, the hosts of all considered ranks are blamed. For
    kind 3, only the host of the rank that failed earliest is blamed, because the error of this rank
    probably made the other ranks fail.
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
    # If more than half of the ranks failed in the same way, they probably have a common cause, such
    # as a collective in which all ranks hang. So blame no host.
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
    """Return a text with the number, host and reason of the lowest rank that recorded a reason.

    If no rank recorded a reason, the text describes the lowest rank with the reason ``default``.
    """
    rank = next((rank for rank, end in ends.items() if end.reason), next(iter(ends)))
    end = ends[rank]
    host = f" on {end.host}" if end.host else ""
    return f"rank {rank}{host}: {end.reason or default}"


def _list_ranks(ranks: list[int]) -> str:
    more = len(ranks) - _SHOWN_RANKS
    names = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {names}"
