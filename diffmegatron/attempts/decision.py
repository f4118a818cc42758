"""Determine why an attempt ended, from the exit statuses that its ranks recorded.

An attempt is one start of a job's ranks. The exit status of srun is not used, because it is the
status of only one rank.
"""

import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from diffmegatron.attempts.ends import EXIT_STOPPED, NOT_BEGUN, End
from diffmegatron.errors import MachineError, UnfitNodeError, UserError

# A process that signal N killed has the exit status _SIGNAL + N.
_SIGNAL = 128
# Exit statuses of ranks that a stop signal killed, because they did not handle it; not a fault.
_STOP_STATUSES = {_SIGNAL + number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
_SHOWN_RANKS = 8


class Cause(StrEnum):
    """Cause of an attempt's end; the cause determines whether the job continues."""

    FINISHED = "finished"
    """All steps are done; the job ends."""
    MISTAKE = "mistake"
    """The user must correct something, such as the recipe; the job ends."""
    STOPPED = "stopped"
    """A signal or the time limit stopped the ranks; the job is requeued."""
    FAULT = "fault"
    """A rank crashed, hung or did not connect, or a node is unfit; a new attempt follows.

    The job ends after ten faults (``MAX_FAULTS`` of attempts/ledger.py) without a new checkpoint.
    """
    LOST = "lost"
    """The job was killed (node failure, preemption, scancel) while ranks ran; not a fault."""


@dataclass(frozen=True)
class Decision:
    """Decision about an ended attempt."""

    cause: Cause
    reason: str  # one sentence for the user
    hosts: tuple[str, ...] = ()  # hosts that probably caused the end; empty if unknown
    unfit: tuple[str, ...] = ()  # hosts that failed the preflight checks


def decide(
    ends: Mapping[int, End], ranks: int, host_of: Callable[[int], str], *, was_killed: bool = False
) -> Decision:
    """Return the cause of an attempt's end, and the hosts to blame.

    Args:
        ends: recorded ends by rank; a rank that recorded no end is missing.
        ranks: number of ranks of the job.
        host_of: function that returns the host of a rank, or "" if it is unknown.
        was_killed: whether the job was killed during the attempt.
    """
    if was_killed:
        # The ranks with status SIGKILL were killed by Slurm. Treat their records as missing.
        ends = {rank: end for rank, end in ends.items() if end.status != _SIGNAL + signal.SIGKILL}
    mistakes = _select(ends, {UserError.exit_status})
    stopped = _select(ends, {EXIT_STOPPED})
    unfit = _select(ends, {UnfitNodeError.exit_status})
    unconnected = _select(ends, {MachineError.exit_status})
    interrupted = _select(ends, _STOP_STATUSES)
    no_failure = {0, EXIT_STOPPED, *_STOP_STATUSES}
    failed = {rank: ends[rank] for rank in sorted(ends) if ends[rank].status not in no_failure}
    has_crash = any(end.status > _SIGNAL for end in failed.values())
    missing = [rank for rank in range(ranks) if rank not in ends]
    hosts_of_missing = tuple(sorted({host_of(rank) for rank in missing} - {""}))
    # If more than half of the ranks are missing, their hosts are probably not the cause.
    are_few_missing = 0 < 2 * len(missing) <= ranks

    if mistakes:
        return Decision(Cause.MISTAKE, _first_reason(mistakes, "a mistake without a message"))
    # All ranks save together. If a stopped rank has saved, failures of other ranks do not matter.
    # Otherwise, a crash may have caused the stop: after a crash, srun stops all other ranks.
    has_saved = any(not end.reason.endswith(NOT_BEGUN) for end in stopped.values())
    if has_saved or (stopped and not has_crash):
        reasons = [end.reason for end in stopped.values() if end.reason]
        return Decision(Cause.STOPPED, min(reasons, default="stopped by a signal, and saved"))
    if unfit:
        hosts = _hosts(unfit.values())
        return Decision(Cause.FAULT, _first_reason(unfit, "its node is not fit"), hosts, hosts)
    if was_killed and missing and not has_crash:
        # Ranks that failed probably lost the connection to the missing ranks. If no rank failed,
        # the missing ranks were killed with the job, and no host is to blame.
        blamed = hosts_of_missing if failed and are_few_missing else ()
        return Decision(Cause.LOST, f"the job ended before {_list_ranks(missing)}", blamed)
    if failed and failed == unconnected:
        blamed = hosts_of_missing if are_few_missing else ()
        return Decision(
            Cause.FAULT, _first_reason(unconnected, "it waited for other ranks"), blamed
        )
    if failed:
        failed = {rank: end for rank, end in failed.items() if rank not in unconnected}
        # In two cases, the failed ranks probably waited for the missing ranks:
        # - The watchdog ended all failed ranks, so they recorded no reason.
        # - No failed rank ran on the host of a missing rank.
        are_hung = all(not end.reason for end in failed.values())
        are_elsewhere = set(hosts_of_missing).isdisjoint(_hosts(failed.values()))
        if are_few_missing and not has_crash and (are_hung or are_elsewhere):
            reason = (
                f"{_list_ranks(missing)} left no exit status, probably lost or frozen, and the "
                "other ranks waited"
            )
            return Decision(Cause.FAULT, reason, hosts_of_missing)
        return _fault(failed, ranks)
    if missing:
        reason = f"{_list_ranks(missing)} left no exit status, probably killed or on a lost node"
        return Decision(Cause.FAULT, reason, hosts_of_missing if len(missing) < ranks else ())
    if interrupted:
        name = signal.Signals(next(iter(interrupted.values())).status - _SIGNAL).name
        return Decision(
            Cause.STOPPED, f"{name} ended {_list_ranks(list(interrupted))} without a save"
        )
    return Decision(Cause.FINISHED, "all steps are done")


def _fault(failed: Mapping[int, End], ranks: int) -> Decision:
    """Return a fault that blames the ranks whose failures are probably closest to the cause.

    Ranks that a signal killed are closest, then hung ranks, then ranks that raised an error.
    """

    def distance(rank: int) -> int:
        if failed[rank].status > _SIGNAL:
            return 0
        return 2 if failed[rank].reason else 1  # Without a reason, the watchdog ended the rank.

    first = min(failed, key=lambda rank: (distance(rank), failed[rank].time))
    # If all failed ranks raised errors, the earliest error probably caused the others. Blame only
    # its host.
    alike = [rank for rank in failed if distance(rank) == distance(first)]
    alike = alike if distance(first) < 2 else [first]
    # Failures of more than half of the ranks have a common cause, such as a hanging collective, so
    # no host is blamed.
    is_local = 2 * len(alike) <= ranks or ranks == 1
    reason = _first_reason({first: failed[first]}, _describe_status(failed[first]))
    return Decision(Cause.FAULT, reason, _hosts(failed[rank] for rank in alike) if is_local else ())


def _describe_status(end: End) -> str:
    if end.status > _SIGNAL:
        number = end.status - _SIGNAL
        names = {each.value: each.name for each in signal.Signals}
        return f"killed by {names.get(number, f'signal {number}')}"
    return f"ended with status {end.status} without a message, probably hung, by the watchdog"


def _select(ends: Mapping[int, End], statuses: Collection[int]) -> dict[int, End]:
    return {rank: ends[rank] for rank in sorted(ends) if ends[rank].status in statuses}


def _hosts(ends: Iterable[End]) -> tuple[str, ...]:
    return tuple(sorted({end.host for end in ends} - {""}))


def _first_reason(ends: Mapping[int, End], default: str) -> str:
    """Return "rank N on HOST: REASON" for the first rank that recorded a reason.

    If no rank recorded a reason, N is the first rank, and REASON is ``default``.
    """
    rank = next((rank for rank, end in ends.items() if end.reason), next(iter(ends)))
    end = ends[rank]
    host = f" on {end.host}" if end.host else ""
    return f"rank {rank}{host}: {end.reason or default}"


def _list_ranks(ranks: list[int]) -> str:
    more = len(ranks) - _SHOWN_RANKS
    names = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (f" and {more} more" if more > 0 else "")
    return f"{'ranks' if ranks[1:] else 'rank'} {names}"
