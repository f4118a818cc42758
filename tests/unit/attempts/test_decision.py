"""The decision after an attempt (one start of a job), made from the exit records of the ranks."""

import pytest

from diffmegatron.attempts.decision import Cause, decide
from diffmegatron.attempts.ends import End

GONE = "connection closed by peer"


def ended(*statuses: int | None, at: tuple[float, ...] = (), reasons=()) -> dict[int, End]:
    """Return the exit record of each rank, with two ranks per host.

    Args:
        statuses: exit status of each rank; None: the rank has no record.
        at: time of the end of each rank; empty: 0 for all ranks.
        reasons: reason of each rank; empty: no rank has a reason.
    """
    return {
        rank: End(
            status=status,
            host=f"n{rank // 2}",
            time=at[rank] if at else 0.0,
            reason=reasons[rank] if reasons else "",
        )
        for rank, status in enumerate(statuses)
        if status is not None
    }


def decided(ends, ranks=4, **options):
    return decide(ends, ranks, lambda rank: f"n{rank // 2}", **options)


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ((0, 0, 0, 0), Cause.FINISHED),
        ((2, 2, 2, 2), Cause.MISTAKE),
        ((2, None, None, None), Cause.MISTAKE),
        ((143, 143, 2, 137), Cause.MISTAKE),
        ((75, 75, 75, 75), Cause.STOPPED),
        ((75, 143, 75, None), Cause.STOPPED),
        ((0, 0, 0, 1), Cause.FAULT),
        ((0, 0, 0, None), Cause.FAULT),
        ((143, 143, 143, None), Cause.FAULT),
        ((143, 143, 139, 143), Cause.FAULT),
        ((143, 143, 138, 130), Cause.STOPPED),
        ((None, None, None, None), Cause.FAULT),
        ((69, 69, None, 69), Cause.FAULT),
        ((71, None, None, None), Cause.FAULT),
        ((71, None, 2, None), Cause.MISTAKE),
    ],
)
def test_the_cause_of_an_attempt_follows_from_the_exit_statuses(statuses, cause):
    assert decided(ended(*statuses)).cause == cause


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ((143, None, 143, 143), Cause.LOST),
        ((None, None, None, None), Cause.LOST),
        ((137, 137, None, None), Cause.LOST),
        ((75, 75, None, 75), Cause.STOPPED),
        ((139, None, None, None), Cause.FAULT),
        ((143, 143, 143, 143), Cause.STOPPED),
        ((2, None, None, None), Cause.MISTAKE),
        ((1, 1, None, None), Cause.LOST),
        ((69, 69, None, None), Cause.LOST),
        ((1, 1, 1, 1), Cause.FAULT),
    ],
)
def test_the_cause_in_a_killed_job_follows_from_the_exit_statuses(statuses, cause):
    assert decided(ended(*statuses), was_killed=True).cause == cause


def test_a_node_lost_with_its_job_is_blamed_before_ranks_that_noticed():
    ends = ended(None, None, 1, 1, reasons=("", "", GONE, GONE))
    decision = decided(ends, was_killed=True)
    assert decision.hosts == ("n0",)
    assert decision.reason == "the job ended before ranks 0, 1"
    assert decided(ended(None, None, 143, 143), was_killed=True).hosts == ()


def test_a_lost_node_is_blamed_before_ranks_that_noticed_its_loss():
    reasons = (GONE, GONE, "", "")
    assert decided(ended(1, 1, None, None, reasons=reasons)).hosts == ("n1",)
    assert decided(ended(1, 1, 1, None, reasons=(*reasons[:2], GONE, ""))).hosts == ("n0",)
    assert decided(ended(1, None, None, None, reasons=reasons)).hosts == ("n0",)
    assert decided(ended(139, 1, None, None, reasons=reasons)).hosts == ("n0",)


def test_a_rank_killed_by_a_signal_is_blamed_before_ranks_that_noticed():
    ends = ended(1, 1, 139, 1, at=(1.0, 1.0, 2.0, 1.0), reasons=(GONE, GONE, "", GONE))
    decision = decided(ends)
    assert decision.hosts == ("n1",)
    assert decision.reason == "rank 2 on n1: killed by SIGSEGV"


def test_the_rank_with_the_earliest_error_is_blamed():
    ends = ended(1, 1, 1, 1, at=(3.0, 3.0, 3.0, 2.0), reasons=(GONE, GONE, GONE, "CUDA error"))
    decision = decided(ends)
    assert (decision.hosts, decision.reason) == (("n1",), "rank 3 on n1: CUDA error")


@pytest.mark.parametrize(
    ("statuses", "hosts"),
    [((None, 0, 0, 0), ("n0",)), ((None,) * 4, ()), ((1, 1, 1, 0), ()), ((1, 0, 0, 0), ("n0",))],
)
def test_no_host_is_blamed_if_most_ranks_failed_alike(statuses, hosts):
    assert decided(ended(*statuses)).hosts == hosts


def test_a_frozen_rank_is_blamed_before_ranks_that_waited_for_it():
    decision = decided(ended(1, 1, None, 1))
    assert decision.hosts == ("n1",)
    assert (
        decision.reason
        == "rank 2 left no exit status, probably lost or frozen, and the other ranks waited"
    )
    assert decided(ended(1, None, None, None)).hosts == ("n0",)
    not_all_hung = decided(ended(1, 1, None, 1, reasons=("", GONE, "", "")))
    assert not_all_hung.reason.startswith("rank 0 on n0")


def test_ranks_that_left_nothing_are_named():
    reason = decided(ended(0), ranks=12).reason
    assert reason.startswith("ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more left no exit status")


def test_a_signal_without_a_name_is_reported_by_number():
    assert "killed by signal 100" in decided(ended(228, 0, 0, 0)).reason


def test_ranks_that_did_not_arrive_are_blamed_before_ranks_that_report_it():
    reasons = ("rank 3 did not arrive",) * 4
    assert decided(ended(69, 69, 69, None, reasons=reasons)).hosts == ("n1",)
    assert decided(ended(69, None, None, None, reasons=reasons)).hosts == ()
    crashed = decided(ended(69, 69, 139, None, reasons=(*reasons[:2], "", "")))
    assert (crashed.hosts, crashed.reason) == (("n1",), "rank 2 on n1: killed by SIGSEGV")


def test_an_unfit_node_is_blamed_and_recorded_as_unfit():
    decision = decided(ended(143, 143, 71, 1, reasons=("", "", "its clock", "gone")))
    assert (decision.hosts, decision.unfit) == (("n1",), ("n1",))
    assert decision.reason == "rank 2 on n1: its clock"


def test_a_crash_in_start_that_stops_the_others_is_a_fault():
    """Check that a crash before the run has begun is a fault, and that its host is blamed.

    After the crash, srun sends SIGTERM to the other ranks, and they exit with status 75. Without
    the crash, these exits would mean that the attempt was stopped.
    """
    asked = "SIGTERM before the run had begun"
    ends = ended(75, 137, 75, 75, reasons=(asked, "", asked, asked))
    found = decided(ends)
    assert (found.cause, found.hosts) == (Cause.FAULT, ("n0",))
    assert (
        decided(ended(75, 137, 75, 75, reasons=(asked, "", "saved", asked))).cause == Cause.STOPPED
    )
    assert decided(ends, was_killed=True).cause != Cause.FAULT
    assert decided(ended(75, 143, 75, 75, reasons=(asked, "", asked, asked))).cause == Cause.STOPPED
