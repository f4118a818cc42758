"""Several ranks on this machine, forked from the server of :mod:`tests.forks`.

The ranks of a launch make all its calls, one after the other. tests/end_to_end,
tests/recovery/test_launch.py and tests/recovery/test_campaign.py start their ranks with the
commands that users run.

The socket that reserves a port for the ranks stays open until their store serves on this socket. If
the socket were closed earlier, any other program could take the port.
"""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from torch import multiprocessing
from torch.distributed import TCPStore

from tests import forks
from tests.deprecations import raise_on_deprecations
from tests.gloo import share_device
from tests.paths import ROOT


def launch(
    ranks: int,
    module: str,
    *calls: list[str],
    timeout: float = 1700,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Call ``main`` of a module on several ranks; the same ranks make all ``calls``.

    Args:
        ranks: number of ranks.
        module: name of a module whose ``main`` reads its arguments from ``sys.argv``.
        calls: arguments of each call.
        timeout: limit for all calls together, in seconds.
        environment: all environment variables of the ranks; None: the variables of this process.
            ``OMP_NUM_THREADS`` is always 1.

    Returns:
        Standard output of all ranks.

    Raises:
        AssertionError: a rank failed; the message has the end of the output.
        subprocess.TimeoutExpired: the calls took longer than ``timeout``.
    """
    # A fork has the libraries that its server imported, and other variables may name others.
    python = forks.python() if environment is None else sys.executable
    process = subprocess.Popen(
        [python, "-m", "tests.ranks", str(ranks), module, json.dumps(calls)],
        env={**(environment or os.environ), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output[-2000:] + errors[-4000:]
    return output


def main() -> None:
    """Fork the ranks and wait until they have made all calls; :func:`launch` runs this function."""
    ranks, module, arguments = sys.argv[1:]
    calls = json.loads(arguments)
    run = importlib.import_module(module).main
    raise_on_deprecations()
    share_device()
    with ExitStack() as exits:
        listeners = [exits.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in calls]
        meetings = [meeting_at(listener) | {"WORLD_SIZE": ranks} for listener in listeners]
        started = multiprocessing.start_processes(
            _run, (run, calls, meetings), nprocs=int(ranks), join=False, start_method="fork"
        )
        # Fork the ranks before a store starts a thread, because a fork does not copy threads.
        stores = [serve_store(listener) for listener in listeners]
        while not started.join():
            pass
        del stores


def meeting_at(listener: socket.socket) -> dict[str, str]:
    """Return the environment variables with which ranks find the store of :func:`serve_store`.

    Args:
        listener: a socket that listens already, so that no other program can take its port before
            the ranks arrive.
    """
    host, port = listener.getsockname()[:2]
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # torchrun sets this variable if it serves the store. Rank 0 then connects to that store
        # instead of serving its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def serve_store(listener: socket.socket) -> TCPStore:
    """Return a store that owns a listening socket and serves on it until the store is deleted."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _run(
    rank: int,
    run: Callable[[], None],
    calls: list[list[str]],
    meetings: list[dict[str, str]],
) -> None:
    for arguments, meeting in zip(calls, meetings, strict=True):
        os.environ |= meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        sys.argv[1:] = arguments
        try:
            run()
        except SystemExit as end:
            if end.code:
                raise


if __name__ == "__main__":
    main()
