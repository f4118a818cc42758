"""Record what a Python process does: its start, imports, forks, compilers and training runs.

``__main__.py`` puts a .pth file into the environment while pytest runs, so that every interpreter
executes this file first with ``RECORDS`` set to the path of the records, even one that is started
without environment variables. It therefore imports only modules that Python itself has loaded.
"""

import atexit
import builtins
import os
import sys
import time

COMPILERS = {"gcc", "g++", "cc", "c++", "cc1", "ptxas", "nvcc", "ninja"}
LIBRARIES = ("torch", "megatron.core", "deepspeed", "transformers", "triton", "lm_eval")
# Pairs of a process and a run that have been recorded.
_runs: set[tuple[int, str]] = set()


def write(kind: str, **values: object) -> None:
    """Append a record; one write call keeps the lines of concurrent processes whole."""
    record = {"kind": kind, "pid": os.getpid(), "test": os.environ.get("PYTEST_CURRENT_TEST", "")}
    descriptor = os.open(RECORDS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)  # noqa: F821
    os.write(descriptor, (repr(record | values) + "\n").encode())
    os.close(descriptor)


def _measure_imports() -> None:
    original, depth, seconds = builtins.__import__, 0, 0.0

    def measured(*args: object, **keywords: object) -> object:
        nonlocal depth, seconds
        if depth:
            return original(*args, **keywords)
        depth, begin = 1, time.process_time()
        try:
            return original(*args, **keywords)
        finally:
            depth = 0
            seconds += time.process_time() - begin

    def end() -> None:
        write(
            "exit",
            cpu=time.process_time(),
            imports=seconds,
            libraries=[name for name in LIBRARIES if name in sys.modules],
        )

    def begin_anew() -> None:
        nonlocal seconds
        seconds = 0.0

    builtins.__import__ = measured
    atexit.register(end)
    # The interpreter that a process was forked from counts its own imports.
    os.register_at_fork(after_in_child=begin_anew)


def _audit(event: str, arguments: tuple) -> None:
    if event == "subprocess.Popen":
        program = os.path.basename(os.fsdecode(arguments[0]))
        if program in COMPILERS:
            write("compile", program=program)
    elif event == "open" and str(arguments[0]).endswith("metrics.jsonl") and arguments[2] & 3:
        _write_training(os.path.dirname(arguments[0]))


def _write_training(run: str) -> None:
    if (os.getpid(), run) in _runs or not os.path.exists(os.path.join(run, "recipe.yaml")):
        return
    import hashlib
    import re

    _runs.add((os.getpid(), run))
    with open(os.path.join(run, "recipe.yaml")) as file:
        recipe = re.sub(r"/\S*/", "", file.read())
    write("training", path=run, recipe=hashlib.sha1(recipe.encode()).hexdigest()[:8])


def _measure_sleeps() -> None:
    original = time.sleep

    def sleep(seconds: float) -> None:
        if seconds >= 0.2:
            write("sleep", seconds=seconds)
        original(seconds)

    time.sleep = sleep


# Python reads the .pth files of a virtual environment twice.
if __name__ + ".costs" not in sys.modules:
    sys.modules[__name__ + ".costs"] = sys
    write("interpreter", command=list(sys.orig_argv[1:4]))
    os.register_at_fork(after_in_child=lambda: write("fork"))
    sys.addaudithook(_audit)
    _measure_imports()
    _measure_sleeps()
