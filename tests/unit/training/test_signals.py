"""Requests to stop: by signals and by the end of a Slurm job."""

import os
import signal
import time

import pytest

from diffmegatron.errors import UserError
from diffmegatron.training.fault_tolerance import signals
from diffmegatron.training.fault_tolerance.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_is_remembered_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_pending(300)
        os.kill(os.getpid(), number)
        assert stop.is_pending(300)
    assert signal.getsignal(number) is before


def test_the_second_ends_the_process_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    with StopRequest():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [], "one request, passed on by Slurm and by torchrun"
        monkeypatch.setattr(signals, "_ONE_REQUEST_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended == [128 + signal.SIGUSR1]


def test_a_second_interrupt_need_not_wait_as_long(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    with StopRequest():
        for _ in range(2):  # the terminal's and the one that torchrun passes on
            os.kill(os.getpid(), signal.SIGINT)
        assert ended == []
        monkeypatch.setattr(signals, "_ONE_INTERRUPT_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [128 + signal.SIGINT]
    assert capfd.readouterr().err == "SIGINT: stopping after this step; again: at once\n"


@pytest.mark.parametrize(("left", "pending"), [(299, True), (301, False)])
def test_the_end_of_a_slurm_job(left, pending, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + left))
    with StopRequest() as stop:
        assert stop.is_pending(300) == pending


def test_the_end_of_a_slurm_job_that_is_no_time(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(UserError, match="SLURM_JOB_END_TIME 'tomorrow'; it must be a number"):
        StopRequest()


def test_a_request_is_remembered_where_nothing_can_be_said(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(signals.os, "write", full)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_pending(300)
