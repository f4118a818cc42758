"""Tests that a fork of :mod:`tests.forks` behaves as an interpreter of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks

PROBE = """
import os, signal, sys, time
print(sys.argv[1:], os.getcwd(), os.environ.get("PROBED"), __name__, sys.stdin.read(), flush=True)
print("an error", file=sys.stderr)
if sys.argv[1] == "wait":
    print(os.getpid(), flush=True)
    time.sleep(600)
if sys.argv[1] == "raise":
    raise ValueError("raised")
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
"""


@pytest.fixture
def probe(tmp_path: Path):
    """Return a function that runs the probe and returns its status, output and errors' lines."""
    (tmp_path / "probe.py").write_text(PROBE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PROBED": "yes"}

    def run(python: str, word: str) -> tuple[int, str, str]:
        command = [python, "-m", "probe", word, "two words"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, input="in", capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize("word", ["0", "7", "a message", "raise"])
def test_a_fork_has_the_status_and_the_output_of_an_interpreter(word, probe):
    assert probe(forks.python(), word) == probe(sys.executable, word)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_client_ends_the_fork(number, tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    client = subprocess.Popen(
        [forks.python(), "-m", "probe", "wait"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    client.stdout.readline()
    fork = Path("/proc", client.stdout.readline().strip())
    assert fork.exists()
    client.send_signal(number)
    assert client.wait(60) == -number
    deadline = time.monotonic() + 60
    while fork.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
