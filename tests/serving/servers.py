"""Start the servers of docs/serve.md, and send them a request."""

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.paths import ROOT
from tests.ports import reserved_ports
from tests.serving import environment, interpreter

# Program -> its code.
PROGRAMS = {
    "vllm": "from vllm.entrypoints.cli.main import main; main()",
    "transformers": "from transformers.cli.transformers import main; main()",
}
# Seconds that a server may take to start on a busy machine.
PATIENCE = 900


def page_command(*words: str) -> list[str]:
    """Return the words of the only command of docs/serve.md that contains all ``words``."""
    lines = (ROOT / "docs/serve.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("    ")]
    (found,) = (each for each in commands if {*words} <= {*each})
    return found


@contextmanager
def serving(command: list[str], export: Path, home: Path) -> Iterator[str]:
    """Run a server with the page's path replaced by ``export``, and yield its URL."""
    program, *words = (str(export) if word.startswith("runs/") else word for word in command)
    home.mkdir()
    with reserved_ports(1) as (port,):
        server = [*program_command(program), *words, "--port", str(port)]
        with answering(server, port, home, home, {}) as url:
            yield url


def program_command(program: str) -> list[str]:
    """Return the command of a program in the environment of vLLM."""
    python = interpreter()
    assert python is not None
    return [python, "-P", "-c", PROGRAMS[program]]


@contextmanager
def answering(
    command: list[str], port: int, cwd: Path, home: Path, variables: dict[str, str]
) -> Iterator[str]:
    """Run a command that becomes a server at ``port``, yield its URL, and end it.

    Args:
        command: the command.
        port: port at which the server answers.
        cwd: folder in which the command runs.
        home: folder of caches and of the file ``log``.
        variables: environment variables to add to this process's for the command.
    """
    log = home / "log"
    serving_variables = environment(home) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        # vLLM otherwise binds each rank to a memory node of its own.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            cwd=cwd,
            env=serving_variables | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            url = f"http://localhost:{port}"
            end = time.monotonic() + PATIENCE
            while not _is_ready(url):
                assert server.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(60)
            finally:
                # Ranks of the server must not outlive it.
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGKILL)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:
        return False


def complete(url: str, **request: Any) -> list[dict[str, Any]]:
    """Return the choices with which a server answers a request for completions."""
    sent = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(request).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(sent, timeout=PATIENCE) as answer:
            choices: list[dict[str, Any]] = json.load(answer)["choices"]
            return choices
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None
