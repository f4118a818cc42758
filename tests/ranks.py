"""Several ranks on this machine, forked from one process that has imported what they run.

Importing torch, Megatron-core and DeepSpeed takes seconds of a core, which under torchrun every
rank spends. And each run has ranks of its own: gloo's threads outlive their process group, and wake
a hundred times a second each. tests/end_to_end, tests/recovery/test_launch.py and the campaign
start theirs as users do.

No port is looked for and given up again before the ranks take it, as any program of the machine may
take it in between.
"""

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from torch import multiprocessing
from torch.distributed import TCPStore

from diffmegatron.optim.zero import import_deepspeed
from tests.deprecations import raise_on_deprecations
from tests.paths import ROOT


def launch(
    ranks: int,
    module: str,
    *calls: list[str],
    timeout: float = 1700,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Call ``main`` of a module on some ranks, for each of ``calls`` on new ones.

    Args:
        ranks: how many.
        module: whose ``main`` takes its arguments from the command line.
        calls: the arguments of each call.
        timeout: of all calls together, in seconds.
        environment: variables of the ranks, in place of this process's.

    Returns:
        What they wrote to standard output.

    Raises:
        AssertionError: one of them failed, with the end of what they wrote.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ranks", str(ranks), module, json.dumps(calls)],
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
    """Import the module, fork the ranks and wait for them, in the process of :func:`launch`."""
    ranks, module, calls = sys.argv[1:]
    run = importlib.import_module(module).main
    import_deepspeed()
    raise_on_deprecations()
    # What was imported is neither looked through nor copied by the ranks' collections.
    gc.freeze()
    for call in json.loads(calls):
        sys.argv[1:] = call
        with socket.create_server(("127.0.0.1", 0)) as listener:
            os.environ |= meeting_at(listener) | {"WORLD_SIZE": ranks}
            started = multiprocessing.start_processes(
                _run, (run,), nprocs=int(ranks), join=False, start_method="fork"
            )
            # The store has a thread, which a fork would not copy: the ranks are forked first.
            store = serve_store(listener)
        while not started.join():
            pass
        del store


def meeting_at(listener: socket.socket) -> dict[str, str]:
    """Return the variables that send ranks to the store of :func:`serve_store`.

    Args:
        listener: a socket that listens already, so that no other program can take its port before
            the ranks arrive.
    """
    host, port = listener.getsockname()[:2]
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # As torchrun announces a store of its own: rank 0 then joins it and does not listen.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def serve_store(listener: socket.socket) -> TCPStore:
    """Serve a store on a socket that listens, and take the socket over; it lives as the object."""
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _run(rank: int, run) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    run()


if __name__ == "__main__":
    main()
