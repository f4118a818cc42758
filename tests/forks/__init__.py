"""A Python that starts in milliseconds, because a process that imported everything forks it.

A new interpreter spends about five seconds of CPU time on importing torch, Megatron-core and
DeepSpeed. :func:`python` returns a command that takes the arguments of ``sys.executable``. With
``-m MODULE`` it is a client (``client.py``) of a server (``server.py``), which forks itself for
each call; with other arguments it is the true interpreter. All workers of pytest share one server,
which the first call of :func:`python` starts and the end of pytest ends.

A fork has the standard files, arguments, working directory and environment variables of its client,
which forwards signals and exits with the status of the fork. Three things differ from an
interpreter of its own: a fork is the leader of its own session, it is not a child of the process
that started the client, and a variable that a library reads while it is imported has no effect.
Tests that depend on them use ``sys.executable``, as does one test of each command of a user.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.paths import ROOT

FOLDER = "DIFFMEGATRON_TEST_FORKS"


@cache
def python() -> str:
    """Return the path of the command; start the server if no worker has started it."""
    folder = Path(os.environ[FOLDER])
    with (folder / "lock").open("w") as lock, (folder / "log").open("a") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "socket").exists():
            server = subprocess.Popen(
                [sys.executable, "-m", "tests.forks.server", folder],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            (folder / "server").write_text(str(server.pid))
            while not (folder / "socket").exists():
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.05)
    return str(folder / "python")


def open_folder() -> None:
    """Create the folder of the command and of the server's socket; this process owns it."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    client = Path(__file__).with_name("client.py")
    (folder / "python").write_text(
        f'#!/bin/sh\nexec {sys.executable} -S -E {client} {folder}/socket "$@"\n'
    )
    (folder / "python").chmod(0o755)
    (folder / "owner").write_text(str(os.getpid()))
    os.environ[FOLDER] = str(folder)


def close_folder() -> None:
    """End the server, if a test has started it, and delete the folder."""
    folder = Path(os.environ.pop(FOLDER))
    with suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((folder / "server").read_text()), signal.SIGTERM)
    shutil.rmtree(folder)


def used_seconds() -> list[str]:
    """Return a line per ended fork: its CPU seconds and the name of the test that started it."""
    path = Path(os.environ[FOLDER]) / "used"
    return path.read_text().splitlines() if path.exists() else []
