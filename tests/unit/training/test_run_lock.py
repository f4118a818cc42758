"""One process at a time in a place, as runs in a run_dir; a dead one is never in the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from diffmegatron import file_lock
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.training.fault_tolerance.safeguards import run_lock

HOLD = """
import sys, time
from pathlib import Path
from diffmegatron.training.fault_tolerance.safeguards import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process in the run_dir."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_with_the_name_of_the_first(holder, tmp_path, capfd):
    with (
        pytest.raises(UserError, match=rf"process {holder.pid} on .* uses run_dir "),
        run_lock(tmp_path, patience=0.5),
    ):
        pass
    assert f"waiting for process {holder.pid}" in capfd.readouterr().err


def test_a_run_that_ends_is_waited_for_however_it_ends(holder, tmp_path):
    threading.Timer(0.5, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with run_lock(tmp_path, patience=20):
        assert 0.4 < time.monotonic() - started < 10


def test_a_file_left_behind_does_not_count(tmp_path):
    (tmp_path / "lock").write_text("process 1 on another")
    with run_lock(tmp_path, patience=0):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "lock").exists()


def test_a_file_that_was_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Between opening the old file and locking it, its owner ends and a third takes a new one."""
    (tmp_path / "lock").write_text("old")
    real, calls = file_lock.fcntl.flock, []

    def removing(descriptor, operation):
        if not calls:
            (tmp_path / "lock").unlink()
        calls.append(real(descriptor, operation))

    monkeypatch.setattr(file_lock.fcntl, "flock", removing)
    with run_lock(tmp_path):
        assert len(calls) == 2
        assert (tmp_path / "lock").exists()


def test_a_directory_made_for_nothing_goes(tmp_path):
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("run_dir", ["/proc/run", "/proc/1/run", "file/run"])
def test_a_place_that_cannot_be_written_is_refused(run_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match="cannot write in run_dir"),
        run_lock(Path(tmp_path, run_dir)),
    ):
        pass


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", refused)
    with run_lock(tmp_path):
        pass
    assert "No locks available" in caplog.text


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lock")
    with pytest.raises(UserError, match="lock is not a file; remove it"), run_lock(tmp_path):
        pass
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").mkdir()
    with pytest.raises(UserError, match="cannot write in run_dir"), run_lock(tmp_path):
        pass
    long = tmp_path / ("n" * 5_000)
    with pytest.raises(UserError, match="File name too long") as caught, run_lock(long):
        pass
    assert len(str(caught.value)) < 400


def test_without_patience_the_second_is_refused_at_once_and_silently(tmp_path, capfd):
    lock = tmp_path / "corpus.lock"
    with (
        FileLock(lock, "--output corpus", "give another --output"),
        pytest.raises(
            UserError, match=r"on .* uses --output corpus; wait until it ends, or give another"
        ),
        FileLock(lock, "--output corpus", "give another --output"),
    ):
        pass
    assert capfd.readouterr().err == ""
    assert not lock.exists()


def test_with_endless_patience_all_are_in_it_one_after_the_other(tmp_path):
    inside, most = [], []

    def enter():
        with FileLock(tmp_path / "lock", "here", "", patience=float("inf")):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.01)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 6
