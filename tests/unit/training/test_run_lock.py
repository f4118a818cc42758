"""A lock (for example on a run_dir) that one process holds until it releases the lock or ends."""

import os
import re
import resource
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
from diffmegatron.training.safeguards import run_lock

HOLD = """
import sys, time
from pathlib import Path
from diffmegatron.training.safeguards import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Yield another process that holds the lock of the run_dir."""
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
    said = capfd.readouterr().err
    name = rf"process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"waiting up to 0 s for {name} to leave run_dir .*\n", said)


def test_a_process_that_waits_names_a_holder_that_has_just_taken_the_lock(holder, tmp_path, capfd):
    name = (tmp_path / "lock").read_text()
    (tmp_path / "lock").write_text("")
    threading.Timer(0.5, lambda: (tmp_path / "lock").write_text(name)).start()
    with pytest.raises(UserError), run_lock(tmp_path, patience=1.5):
        pass
    assert capfd.readouterr().err.startswith(f"waiting up to 2 s for {name} to leave")


def test_a_run_waits_until_a_killed_run_releases_the_lock(holder, tmp_path):
    threading.Timer(0.5, lambda: os.kill(holder.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with run_lock(tmp_path, patience=20):
        assert 0.4 < time.monotonic() - started < 10


def test_a_stale_lock_file_is_ignored(tmp_path):
    (tmp_path / "lock").write_text("process 1 on another")
    with run_lock(tmp_path, patience=0):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / "lock").exists()


def test_a_lock_whose_holder_cannot_be_written_is_released(tmp_path):
    """Check that a full disk, on which no file can grow, leaves neither the lock nor its file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(UserError, match="cannot write in run_dir"), run_lock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "lock").exists()
    with run_lock(tmp_path, patience=0):
        assert (tmp_path / "lock").exists()


def test_a_lock_on_a_removed_file_is_taken_again(tmp_path, monkeypatch):
    """Check that a new lock file is locked if another process has removed the old file.

    The other process removes the file after this process has opened it, but before this process has
    locked it.
    """
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


def test_an_empty_run_dir_is_removed_with_its_lock(tmp_path):
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


def test_a_file_system_without_locks_only_warns(tmp_path, monkeypatch, caplog):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", refused)
    with run_lock(tmp_path):
        pass
    assert "No locks available" in caplog.text


def test_an_unusable_lock_path_is_refused(tmp_path):
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


def test_a_second_lock_without_patience_is_refused_without_waiting(tmp_path, capfd):
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


def test_a_lock_file_removed_by_its_leaving_holder_is_locked_at_once(tmp_path, monkeypatch):
    """Check that a new lock file is locked if the previous holder has removed the old file.

    The holder removes the file after this process has opened it, but before this process has locked
    it. The default patience of 0 is enough, because no process holds the lock then.
    """
    real, lock = file_lock.fcntl.flock, tmp_path / "corpus.lock"

    def flock(descriptor, operation):
        lock.unlink(missing_ok=True)
        monkeypatch.setattr(file_lock.fcntl, "flock", real)
        real(descriptor, operation)

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)
    with FileLock(lock, "--output corpus", "give another --output"):
        assert lock.exists()
    assert not lock.exists()


def test_threads_with_endless_patience_hold_the_lock_one_at_a_time(tmp_path):
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
