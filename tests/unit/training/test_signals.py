"""Requests to stop a run: signals, and the end of a Slurm job."""

import os
import signal
import time

import pytest

from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.training import safeguards
from diffmegatron.training.safeguards import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_the_first_signal_is_pending_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with StopRequest(LaunchEnvironment()) as stop:
        assert not stop.is_pending(300)
        os.kill(os.getpid(), number)
        assert stop.is_pending(300)
    assert signal.getsignal(number) is before


def test_a_second_stop_request_ends_the_process_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(safeguards.os, "_exit", ended.append)
    with StopRequest(LaunchEnvironment()):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended == [], "two signals of one request (from Slurm and torchrun) ended the process"
        monkeypatch.setattr(safeguards, "_ONE_REQUEST_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ended == [128 + signal.SIGUSR1]


def test_a_second_interrupt_has_its_own_interval(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(safeguards.os, "_exit", ended.append)
    with StopRequest(LaunchEnvironment()):
        # The terminal and torchrun each send one SIGINT.
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert ended == []
        monkeypatch.setattr(safeguards, "_ONE_INTERRUPT_SECONDS", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [128 + signal.SIGINT]
    assert capfd.readouterr().err == "SIGINT: stopping after this step; again: at once\n"


@pytest.mark.parametrize(("left", "pending"), [(299, True), (301, False)])
def test_a_stop_is_pending_near_the_end_of_a_slurm_job(left, pending):
    with StopRequest(LaunchEnvironment(job_end=time.time() + left)) as stop:
        assert stop.is_pending(300) == pending


def test_a_stop_signal_counts_even_if_nothing_can_be_printed(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safeguards.os, "write", full)
    with StopRequest(LaunchEnvironment()) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_pending(300)
