"""Report what one GPU computes with this package, in about nine minutes: `make gpu-report`.

The steps come in order of worth: tests of the kernels, `diffmegatron tune` at the 3B shapes, layers
of every kind compared with their baseline, estimated and allocated memory, training runs of 0.36B,
a stopped and resumed run compared with an undisturbed one, and exports with an evaluation. A step
is a process, or several one after the other, with a deadline of its own; its output is STEP.log.
After each step `gpu_report.md`, `results.json` and `gpu_report.tar.gz` are replaced, so a killed
report leaves the results of all finished steps.

    python -m tools.benchmarks gpu_report               # on a GPU
    python -m tools.benchmarks gpu_report --rehearse    # tiny sizes, also without a GPU
"""

import argparse
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.files import format_path
from diffmegatron.measurements.machine import cpu_name
from diffmegatron.operations.installed_code import git_commit, library_versions
from tools.benchmarks.gpu_report_page import (
    DONE,
    FAILED,
    NOT_TESTED,
    Result,
    summarize,
    write_page,
)
from tools.benchmarks.json_report import write_json_report
from tools.paths import ROOT

PAGE = "gpu_report.md"
SECONDS = 540
# Seconds that a process has between SIGTERM and SIGKILL, in which a training run saves.
GRACE = 20
# A step does not start if less than this many seconds are left.
LEAST = 10
# Exit status of a training run that was stopped by a signal and can be resumed.
STOPPED = 75
# Exit statuses of `timeout` if the time is over, and if the process did not end by SIGTERM.
LATE, LATE_AND_KILLED = 124, 137
PR_SET_PDEATHSIG = 1
# Names in the folder of a report, beside the logs of the steps.
FOLDERS = ("cache", "evaluation", "work")
FILES = (
    PAGE,
    *("results.json", "gpu_report.tar.gz"),
    *("gpu_report.unfinished", "results.unfinished", "gpu_report.tar.unfinished"),
    *("kernels.json", "layer.json", "layer.md", "memory.json"),
)
ARCHIVED = (
    "*.log",
    "*.json",
    "*.md",
    "cache/*.json",
    "evaluation/report.md",
    "work/*/metrics.jsonl",
    "work/*/recipe.yaml",
)


@dataclass(frozen=True)
class Step:
    """A part of the report.

    Attributes:
        name: name of the log; the part before "_" selects the summary in ``gpu_report_page.py``.
        seconds: deadline from the start of the step, if the whole report has `SECONDS`.
        commands: modules with arguments, which Python runs one after the other. Braces stand for
            values of `SIZES`, and for {out}, {work} and {sources}: the folder of the report, its
            subfolder for runs, and the override that makes a run read the prepared text.
        stopped: index of the command that must end with status 75; None: none does.
    """

    name: str
    seconds: int
    commands: Sequence[str]
    stopped: int | None = None


TESTS = (
    "pytest -rs --tb=short --timeout=150 -p no:cacheprovider -p tools.benchmarks.pytest_outcomes "
)
TRAIN = "train {recipe} {sources} run_dir={work}/"
EXACT = (
    " training.deterministic=true training.eval_batches=0 model.num_layers=2 model.vocab_size=1024"
    " {exact}"
)
# The first start of this command stops after half of the steps, and the second one resumes.
RESUME = f"diffmegatron --import tools.benchmarks.stop_at_half {TRAIN}resumed{EXACT}"
STEPS = (
    Step("doctor", 30, ["diffmegatron doctor"]),
    # Compilation takes most of the time of the kernels' tests, so several processes run them.
    Step(
        "kernels",
        150,
        [TESTS + "--outcomes={out}/kernels.json -n {workers} tests/gpu/test_kernels_gpu.py"],
    ),
    Step("tune", 100, ["diffmegatron tune {tuned}"]),
    Step(
        "layer",
        70,
        [
            "tools.benchmarks layer --name={out}/layer --attention=diff_v1 --attention=diff_v2 "
            "--attention=grouped,signal_per_noise=3 {layer}"
        ],
    ),
    Step("memory", 60, [TESTS + "--outcomes={out}/memory.json tests/gpu/test_memory_gpu.py"]),
    Step(
        "prepare",
        30,
        ["diffmegatron prepare {text} --pattern *.py --tokenizer bytes --output {work}/text"],
    ),
    Step("train_diff_v1", 60, [f"diffmegatron {TRAIN}diff_v1"]),
    Step("train_diff_v2", 60, [f"diffmegatron {TRAIN}diff_v2 model.attention.kind=diff_v2"]),
    Step("train_softmax", 60, [f"diffmegatron {TRAIN}softmax model.baseline=true"]),
    Step("resume", 80, [f"diffmegatron {TRAIN}whole{EXACT}", RESUME, RESUME], stopped=1),
    Step(
        "export",
        90,
        [
            "diffmegatron export {work}/softmax {work}/hf/softmax",
            "diffmegatron export {work}/diff_v1 {work}/hf/diff_v1",
            "diffmegatron evaluate {work}/hf/softmax {work}/hf/diff_v1 --suite loss,throughput "
            "--data docs=docs --out {out}/evaluation --set throughput.repetitions=3 {evaluate}",
        ],
    ),
)
SIZES = {
    "recipe": "tools/benchmarks/gpu_report.yaml",
    "tuned": "configs/diff_3b_350b.yaml configs/diff_v2_3b_350b.yaml configs/grouped_3b_350b.yaml",
    "layer": "training.micro_batch_size=4",
    "exact": "training.steps=20",
    "evaluate": "--set loss.documents=8 --set throughput.context=2048",
    "text": str(Path(os.__file__).parent),
    "workers": str(min(8, os.cpu_count() or 1)),
}
REHEARSAL = {
    "recipe": "tools/benchmarks/gpu_report_tiny.yaml",
    "tuned": "tools/benchmarks/gpu_report_tiny.yaml",
    "layer": "--recipe tools/benchmarks/gpu_report_tiny.yaml --layers 1 2 --repetitions 1",
    "exact": "training.steps=4",
    "evaluate": "--set loss.documents=1 --set loss.context=64 --set throughput.context=32 "
    "--set throughput.decoded=2",
    "text": str(Path(os.__file__).parent / "json"),
    "workers": "0",
}


def main(arguments: argparse.Namespace) -> None:
    """Run all steps, and write the report after each.

    Exit with 1 if a step failed or is wrong, or, except in a rehearsal, if all its tests were
    skipped.
    """
    if find_spec("pytest") is None:
        raise UserError("gpu_report runs tests, and pytest is not installed; run 'make install'")
    folder = arguments.out.absolute()
    clear(folder)
    # A rehearsal shows whether the steps work, on a machine that may be slow or busy.
    seconds = arguments.seconds or (10 * SECONDS if arguments.rehearse else SECONDS)
    started, share = time.monotonic(), seconds / SECONDS
    machine = describe_machine()
    results: list[Result] = []
    for step in STEPS:
        left = started + seconds - time.monotonic()
        limit = min(step.seconds * share, left)
        print(f"{step.name} (at most {max(limit, 0):.0f} s)", flush=True)
        commands = fill_in(step, folder, REHEARSAL if arguments.rehearse else SIZES)
        results.append(run_step(step, commands, folder, limit))
        print(f"  {results[-1].decision}: {results[-1].sentence}", flush=True)
        write_report(folder, machine, results, is_rehearsal=arguments.rehearse)
    print(f"wrote {folder / PAGE}")
    bad = {"wrong"} if arguments.rehearse else {"wrong", NOT_TESTED}
    if any(result.has_failed or result.decision in bad for result in results):
        sys.exit(1)


def clear(folder: Path) -> None:
    """Create the folder of a report; delete the files of an earlier report, and no others."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {format_path(folder)} is a file; give a folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / PAGE).exists():
        raise UserError(f"--out {format_path(folder)} holds other files; give an empty folder")
    logs = [f"{step.name}.log" for step in STEPS]
    for name in (*FOLDERS, *FILES, *logs):
        path = folder / name
        if name in FOLDERS:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    (folder / "work").mkdir(parents=True)
    (folder / PAGE).write_text("# GPU report: no step has ended yet\n")


def fill_in(step: Step, folder: Path, sizes: Mapping[str, str]) -> list[list[str]]:
    """Return the arguments of Python for each command of a step."""
    sources = f"data.sources=[{{path: {folder / 'work/text'}}}]"
    places = {"out": str(folder), "work": str(folder / "work"), "sources": sources}
    commands = []
    for command in step.commands:
        words = []
        for word in command.split():
            # A size may be several words; the place of a file may contain spaces.
            is_size = word.startswith("{") and word[1:-1] in sizes
            words += shlex.split(sizes[word[1:-1]]) if is_size else [word.format(**places)]
        commands.append(["-m", *words])
    return commands


def run_step(step: Step, commands: Sequence[Sequence[str]], folder: Path, seconds: float) -> Result:
    """Run the commands of a step within so many seconds, and summarize its files."""
    name = step.name
    if seconds < LEAST:
        return Result(name, "not started", 0, "no time was left")
    started, status = time.monotonic(), DONE
    with (folder / f"{name}.log").open("ab", buffering=0) as log:
        for number, command in enumerate(commands):
            log.write(f"$ python {shlex.join(command)}\n".encode())
            left = started + seconds - time.monotonic()
            code = run_process(command, log.fileno(), left, folder)
            if code in (LATE, LATE_AND_KILLED):
                status = "stopped at its deadline"
            elif number == step.stopped and code == 0:
                status = f"{FAILED}, because a run ended that should have been stopped"
            elif code != (STOPPED if number == step.stopped else 0):
                status = f"{FAILED} with status {code}"
            if status != DONE:
                break
    finding = summarize(name, folder)
    took = round(time.monotonic() - started)
    return Result(name, status, took, **vars(finding))


def run_process(command: Sequence[str], log: int, seconds: float, folder: Path) -> int:
    """Run Python for at most so many seconds, and return the exit status of ``timeout``.

    ``timeout`` ends the process and its children at the limit, and when this process is killed.
    """
    environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "PYTHONUNBUFFERED": "1"}
    # The measurements of this report become a part of it, and the user's own stay as they are.
    environment["DIFFMEGATRON_CACHE"] = str(folder / "cache")
    limit = f"{max(seconds, 1):.1f}"
    process = subprocess.Popen(
        ["timeout", f"--kill-after={GRACE}", limit, sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=end_with_parent,
    )
    with ending(process):
        return process.wait()


def end_with_parent() -> None:
    """Request SIGTERM for this process when its parent ends, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def ending(process: subprocess.Popen) -> Iterator[None]:
    """End the process if SIGTERM or an exception such as Ctrl-C ends this program meanwhile."""

    def stop(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def describe_machine() -> dict[str, str]:
    """Return the GPU with driver, memory, power limit and clock, the CPU, versions and commit.

    PyTorch is not imported, because its context would occupy memory of the GPU.
    """
    query = "--query-gpu=name,driver_version,memory.total,power.limit,clocks.max.sm"
    command = ["nvidia-smi", query, "--format=csv,noheader", "--id=0"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        gpu = asked.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        gpu = "none"
    about = {"gpu": gpu, "cpu": cpu_name(), "cores": str(os.cpu_count())}
    return about | library_versions() | {"commit": git_commit() or "unknown"}


def write_report(
    folder: Path, machine: Mapping[str, str], results: Sequence[Result], *, is_rehearsal: bool
) -> None:
    """Write page, results and archive; each of these files is complete, or it is the earlier."""

    def archive(path: Path) -> None:
        with tarfile.open(path, "w:gz") as tar:
            for pattern in ARCHIVED:
                for file in sorted(folder.glob(pattern)):
                    tar.add(file, Path("gpu_report") / file.relative_to(folder))

    report = {"machine": dict(machine), "steps": [vars(result) for result in results]}
    not_ended = [step.name for step in STEPS[len(results) :]]
    replace(folder / "results.json", lambda path: write_json_report(path, report))
    replace(
        folder / PAGE,
        lambda path: write_page(path, machine, results, not_ended, is_rehearsal=is_rehearsal),
    )
    replace(folder / "gpu_report.tar.gz", archive)


def replace(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name, and rename it."""
    unfinished = path.with_suffix(".unfinished")
    write(unfinished)
    unfinished.replace(path)
