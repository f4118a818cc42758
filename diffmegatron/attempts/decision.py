"""Decide from the ends of its ranks whether a job is requeued or ended.

The exit status of srun is not used. It is the status of only one rank, and srun kills the others
as soon as one has failed.
"""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from diffmegatron.attempts.ends import EXIT_STOPPED, NOT_BEGUN, End
from diffmegatron.errors import MachineError, UnfitNodeError, UserError

# The exit status of a process that a signal ended is this plus the signal's number.
_SIGNAL = 128
# Users, Slurm and srun send these signals to stop a rank. Before a rank has installed its handlers
# they end it with these statuses, which are not faults.
_STOP_STATUSES = {_SIGNAL + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
_SHOWN_RANKS = 8


class Cause(StrEnum):
    """The cause of an attempt's end, which determines how the job continues."""

    FINISHED = "finished"
    """All steps are done. The job ends."""
    MISTAKE = "mistake"
    """A person must correct something. The job ends."""
    STOPPED = "stopped"
    """A signal or the time limit stopped the ranks. The job is requeued."""
    FAULT = "fault"
    """A rank crashed, hung or did not arrive. The job is requeued, and the fault is counted."""
    LOST = "lost"
    """The job ended before its ranks (node failure, preemption, scancel). This is not counted."""


@dataclass(frozen=True)
class Decision:
    """The decision about an ended attempt.

    Attributes:
        cause: cause of the end.
        reason: one sentence.
        hosts: hosts of the ranks that caused a fault; empty: unknown.
        unfit: hosts among ``hosts`` that failed the preflight checks.
    """

    cause: Cause
    reason: str
    hosts: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


def decide(
    ends: Mapping[int, End], ranks: int, host_of: Callable[[int], str], *, was_killed: bool = False
) -> Decision:
    """Decide about an ended attempt.

    The first rule that applies decides:

    1. A rank that ended with a mistake makes the attempt a mistake.
    2. A rank with status 75 either saved together with all others, so that later failures do not
       matter, or had nothing to save, which counts only if no other rank crashed.
    3. A rank on an unfit node is a fault.
    4. If the job was killed, missing ends are not faults, because ranks fail when their peers are
       lost. Only a rank that a signal killed is a fault.
    5. Any other failed rank, or a rank without an end, is a fault.
    6. Ranks that a stop signal ended before they could save were stopped.

    Args:
        ends: ends by rank; a rank without a record is missing.
        ranks: number of ranks.
        host_of: function that returns the host of a rank without an end.
        was_killed: whether the job ended before its ranks.
    """
    if was_killed:  # some shells outlive their killed ranks and record the kill
        ends = _select(ends, lambda end: end.status != _SIGNAL + signal.SIGKILL)
    mistakes = _select(ends, lambda end: end.status == UserError.exit_status)
    if mistakes:
        return Decision(Cause.MISTAKE, _first_reason(mistakes, "a mistake without a message"))
    stopped = _select(ends, lambda end: end.status == EXIT_STOPPED)
    saved = _select(stopped, lambda end: not end.reason.endswith(NOT_BEGUN))
    crashed = _select(ends, lambda end: end.status > _SIGNAL and end.status not in _STOP_STATUSES)
    # When a rank is killed, srun stops the others, including those that have not begun.
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
        # If ranks on other nodes failed, a node died and ended the job.
        reason = f"the job ended before {_list_ranks(missing)}"
        return Decision(Cause.LOST, reason, absent if failed and 2 * len(missing) <= ranks else ())
    unmet = _select(failed, lambda end: end.status == MachineError.exit_status)
    if unmet and unmet == failed:
        # The ranks that report this had arrived. The missing ranks left no end.
        hosts = absent if 2 * len(missing) <= ranks else ()
        return Decision(Cause.FAULT, _first_reason(unmet, ""), hosts)
    if failed:
        failed = {rank: failed[rank] for rank in failed if rank not in unmet}
        if missing and 2 * len(missing) <= ranks and _only_waited(failed, set(absent)):
            reason = (
                f"{_list_ranks(missing)} left no exit status, and the others waited: lost or frozen"
            )
            return Decision(Cause.FAULT, reason, absent)
        return _fault(failed, ranks)
    if missing:
        reason = f"{_list_ranks(missing)} left no exit status: it was killed, or the node was lost"
        return Decision(Cause.FAULT, reason, absent if len(missing) < ranks else ())
    interrupted = _select(ends, lambda end: end.status in _STOP_STATUSES)
    if interrupted:
        name = signal.Signals(next(iter(interrupted.values())).status - _SIGNAL).name
        return Decision(
            Cause.STOPPED, f"{name} ended {_list_ranks(list(interrupted))} before a step"
        )
    return Decision(Cause.FINISHED, "all steps are done")


def _only_waited(failed: Mapping[int, End], absent: set[str]) -> bool:
    """Return whether the failed ranks failed only because other ranks, without an end, were lost.

    Either the watchdog ended all of them (it does not run in a frozen rank), or they raised errors
    on hosts that had no missing rank.
    """
    if any(end.status > _SIGNAL for end in failed.values()):
        return False
    is_hung = all(not end.reason for end in failed.values())
    return is_hung or absent.isdisjoint(end.host for end in failed.values())


def _fault(failed: Mapping[int, End], ranks: int) -> Decision:
    """Blame the rank that failed first, because its end made the others fail.

    A rank that a signal killed (by the kernel out of memory, or SIGSEGV) precedes a rank without an
    error message, which the watchdog ended, and that precedes a rank that raised an error.
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
    # If most ranks ended in the same way, all of them waited for something, and none is to blame.
    blamed = hosts if 2 * len(alike) <= ranks or ranks == 1 else ()
    reason = _first_reason({first: failed[first]}, _describe_status(failed[first]))
    return Decision(Cause.FAULT, reason, blamed)


def _describe_status(end: End) -> str:
    if end.status > _SIGNAL:
        number = end.status - _SIGNAL
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"
    return f"ended with status {end.status} without a message, as the watchdog ends a hung rank"


def _select(ends: Mapping[int, End], condition: Callable[[End], bool]) -> dict[int, End]:
    return {rank: ends[rank] for rank in sorted(ends) if condition(ends[rank])}


def _hosts(ends: Mapping[int, End]) -> tuple[str, ...]:
    return tuple(sorted({end.host for end in ends.values()} - {""}))


def _first_reason(ends: Mapping[int, End], default: str) -> str:
    """Return the reason of the first rank that has one, with the rank and its host."""
    rank = next((rank for rank, end in ends.items() if end.reason), next(iter(ends)))
    end = ends[rank]
    host = f" on {end.host}" if end.host else ""
    return f"rank {rank}{host}: {end.reason or default}"


def _list_ranks(ranks: list[int]) -> str:
    more = len(ranks) - _SHOWN_RANKS
    names = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {names}"
