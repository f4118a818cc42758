"""Process that has imported the package and its libraries, and forks itself for each client."""

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from diffmegatron.parallel.engine_imports import importing_engines

with importing_engines():
    import diffmegatron.cli
    import diffmegatron.evaluation.evaluate
    import diffmegatron.operations.quickstart
    import diffmegatron.training.trainer  # noqa: F401
    from diffmegatron.optim.zero import import_deepspeed

MAX_REQUEST = 1 << 20
# Modules that a run imports while it builds its network and its optimizer.
OF_A_RUN = (
    "megatron.core.transformer.moe.experts",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.utils.pin_memory",
    "torch._subclasses.schema_check_mode",
    "diffmegatron.attention.kernels.pytorch.blocked",
)
# Seconds between checks whether pytest has died without ending this process.
CHECK = 5


def main() -> None:
    folder = Path(sys.argv[1])
    import_deepspeed()
    for module in OF_A_RUN:
        with suppress(ImportError):  # Other versions of the libraries have other modules.
            importlib.import_module(module)
    # The forks do not collect frozen objects, so the memory of the imported modules stays shared.
    gc.freeze()
    request = serve(folder)
    if request is not None:
        sys.executable = str(folder / "python")
        run(request["arguments"])


def run(arguments: list[str]) -> NoReturn:
    """Run a module as a program, and exit without the clean-up of objects, which takes long."""
    sys.argv[:] = arguments
    status: object = None
    try:
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int | None):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def serve(folder: Path) -> dict[str, Any] | None:
    """Fork for every client; return its request in the fork, and None if pytest has ended."""
    owner = Path("/proc", (folder / "owner").read_text())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "starting"))
    listener.listen(64)
    (folder / "starting").rename(folder / "socket")
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    log = (folder / "used").open("a", buffering=1)
    while owner.exists():
        for key, _ in selector.select(CHECK):
            if key.fileobj is not listener:
                key.data()
            elif (request := fork(listener.accept()[0], selector, log)) is not None:
                return request
    return None


def fork(
    client: socket.socket, selector: selectors.BaseSelector, log: TextIO
) -> dict[str, Any] | None:
    """Fork; return the client's request in the fork, and None in the server.

    When the fork ends, write its CPU seconds and the name of the test that started it to ``log``.
    """
    message, files, _, _ = socket.recv_fds(client, MAX_REQUEST, 3)
    if not message:  # The client has been killed.
        client.close()
        return None
    request = json.loads(message)
    test = request["environment"].get("PYTEST_CURRENT_TEST", "")
    process = os.fork()
    if process == 0:
        become(request, files)
        return request
    for file in files:
        os.close(file)
    end = os.pidfd_open(process)

    def report() -> None:
        _, status, used = os.wait4(process, 0)
        log.write(f"{used.ru_utime + used.ru_stime:.2f} {test}\n")
        with suppress(BrokenPipeError):
            client.send(str(status).encode())
        selector.unregister(end)
        selector.unregister(client)
        os.close(end)
        client.close()

    def kill() -> None:
        """Kill the fork's processes, because its client has been killed."""
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    client.send(str(process).encode())
    selector.register(end, selectors.EVENT_READ, report)
    selector.register(client, selectors.EVENT_READ, kill)
    return None


def become(request: dict[str, Any], files: list[int]) -> None:
    """Take over the standard files, the environment and the working directory of a client."""
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # New objects, because the old ones remember whether the server's files can seek.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (1, 2)
    )
    if request["is_unbuffered"]:
        sys.stdout.reconfigure(write_through=True)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    folders = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [request["cwd"], *filter(None, folders)]


if __name__ == "__main__":
    main()
