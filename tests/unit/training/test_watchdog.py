"""The watchdog writes the stacks of a process that makes no progress, and ends the process."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffmegatron.config.recovery_config import WatchdogConfig
from diffmegatron.training.safeguards import Watchdog

SCRIPT = """
import sys, threading, time
from pathlib import Path
from diffmegatron.config.recovery_config import WatchdogConfig
from diffmegatron.training.safeguards import Watchdog

def a_thread_of_the_loader():
    time.sleep(60)

def a_step_that_hangs():
    {hang}

threading.Thread(target=a_thread_of_the_loader, daemon=True).start()
{handler}
config = WatchdogConfig(startup_seconds={startup}, step_seconds={step})
with Watchdog(config, Path(sys.argv[1]), 0) as watchdog:
    {before}
    a_step_that_hangs()
"""


def run(folder: Path, **parts: object) -> tuple[int, float, str]:
    script = SCRIPT.format(**({"hang": "time.sleep(60)", "before": "pass", "handler": ""} | parts))
    started = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=600,
    )
    stacks = folder / "stacks" / "rank_00000.txt"
    text = stacks.read_text() if stacks.is_file() else result.stderr
    return result.returncode, time.monotonic() - started, text


@pytest.mark.parametrize(
    "parts",
    [
        {"startup": 1, "step": 50},
        {"startup": 50, "step": 1, "before": "watchdog.restart_timer()"},
        # This hang holds the global interpreter lock, so a Python thread could not end it.
        {"startup": 1, "step": 50, "hang": "__import__('re').match('(a*)*b', 'a' * 40)"},
    ],
    ids=["startup", "step", "lock"],
)
def test_a_hang_ends_with_the_stacks_of_all_threads(parts, tmp_path):
    status, seconds, stacks = run(tmp_path, **parts)
    assert status == 1
    assert 1 <= seconds < 40
    assert "a_step_that_hangs" in stacks
    assert "a_thread_of_the_loader" in stacks


def test_progress_and_long_limits_do_not_trigger_the_watchdog(tmp_path):
    before = "watchdog.restart_timer()\n    with watchdog.long_limit(): time.sleep(2)"
    status, _, stacks = run(tmp_path, startup=50, step=1, before=before, hang="pass")
    assert (status, stacks) == (0, "")
    assert not (tmp_path / "stacks").exists()


@pytest.mark.parametrize("earlier", ["", "of an earlier hang\n"], ids=["new", "there"])
def test_a_handled_stop_signal_writes_no_stacks(earlier, tmp_path):
    path = tmp_path / "stacks" / "rank_00000.txt"
    if earlier:
        path.parent.mkdir()
        path.write_text(earlier)
    # The run installs its handler of SIGTERM first. The watchdog's handler calls the run's handler.
    status, _, _ = run(
        tmp_path,
        startup=50,
        step=50,
        handler="import os, signal; signal.signal(signal.SIGTERM, lambda *_: None)",
        hang="os.kill(os.getpid(), signal.SIGTERM)",
    )
    assert status == 0
    assert path.is_file() == bool(earlier)
    assert not earlier or path.read_text() == earlier


def test_stacks_go_to_standard_error_where_no_file_can_be_made(tmp_path):
    (tmp_path / "stacks").write_text("")
    status, _, said = run(tmp_path, startup=1, step=50)
    assert status == 1
    assert f"cannot write {tmp_path}/stacks/rank_00000.txt: File exists; the run continues" in said
    assert "a_step_that_hangs" in said


@pytest.mark.parametrize("then", ["", "run_dir.write_text('')"], ids=["removed", "a file"])
def test_a_run_dir_removed_during_the_run_is_not_an_error_at_exit(then, tmp_path):
    hang = f"import shutil; run_dir = Path(sys.argv[1]); shutil.rmtree(run_dir); {then}"
    status, _, said = run(tmp_path / "run", startup=50, step=50, hang=hang)
    assert (status, said) == (0, "")


def test_a_stacks_file_that_cannot_be_truncated_only_warns(tmp_path, monkeypatch, caplog):
    """Check that the watchdog logs an error of ``ftruncate`` and does not raise it.

    The error occurs, for example, if the folder was removed on a network file system.
    """

    def refuse(*_: object) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("os.ftruncate", refuse)
    with Watchdog(WatchdogConfig(), tmp_path, 0):
        pass
    assert "Stale file handle" in caplog.text
    assert not (tmp_path / "stacks").exists()
