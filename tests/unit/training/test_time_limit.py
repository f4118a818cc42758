"""The end time of a Slurm job, which an administrator may change while the job runs."""

import time
from pathlib import Path

import pytest

from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.training import safeguards
from diffmegatron.training.safeguards import JOB_END, StopRequest


def stop_request(job_end: float | None, folder: Path) -> StopRequest:
    return StopRequest(LaunchEnvironment(job_end=job_end), folder)


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch):
    monkeypatch.setattr(safeguards, "_JOB_END_SECONDS", 0.0)


@pytest.mark.parametrize("noted", [None, "", "soon", "-1", "99999999999999999999" * 9])
def test_the_initial_job_end_holds_if_the_file_is_missing_or_invalid(noted, tmp_path):
    if noted is not None:
        (tmp_path / JOB_END).write_text(noted)
    assert stop_request(time.time() + 100, tmp_path).is_pending(101)
    assert not stop_request(time.time() + 100, tmp_path).is_pending(99)
    assert not stop_request(None, tmp_path).is_pending(1e9)


def test_the_end_moves_while_the_job_runs(tmp_path):
    stop = stop_request(time.time() + 1000, tmp_path)
    seen = [stop.is_pending(300)]
    for noted in (time.time() + 200, time.time() + 5000, "none", time.time() + 200):
        (tmp_path / JOB_END).write_text(f"{noted if noted == 'none' else int(noted)}\n")
        seen.append(stop.is_pending(300))
    assert seen == [False, True, False, False, True]


def test_the_file_is_not_read_at_every_step(tmp_path, monkeypatch):
    monkeypatch.setattr(safeguards, "_JOB_END_SECONDS", 10.0)
    stop = stop_request(time.time() + 1000, tmp_path)
    assert not stop.is_pending(300)
    (tmp_path / JOB_END).write_text("1\n")
    assert not stop.is_pending(300)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    assert stop.is_pending(300)


@pytest.mark.parametrize(("signal_seconds", "is_due"), [(None, False), (90, False), (110, True)])
def test_a_stop_by_slurms_signal_is_due_to_the_end_of_the_job(signal_seconds, is_due, tmp_path):
    limits = LaunchEnvironment(job_end=time.time() + 100, signal_seconds=signal_seconds)
    stop = StopRequest(limits, tmp_path)
    assert stop.is_due_to_job_end(50) == is_due
    assert stop.is_due_to_job_end(101)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_watches_the_limit_for_all(rank, tmp_path):
    (tmp_path / JOB_END).write_text("1\n")
    launch = LaunchEnvironment(rank=rank, ranks=2, job_end=time.time() + 9999)
    assert StopRequest(launch, tmp_path).is_pending(300) == (rank == 0)
