"""Measure on a CPU how long a small run takes to its first step, by phase; and time `--help`.

Each start is a new process. It imports torch, Megatron-core, the modules of a run and DeepSpeed,
builds the network of `configs/quickstart.yaml` and takes one step. There are two modes: "train"
imports with `parallel/engine_imports.py`, which makes imports faster, as `diffmegatron train` does;
"plain" imports without it. The two modes alternate. Times are CPU times of the process, because
other processes disturb them less than wall time; on an idle machine the two are equal. Figures are
medians over the repetitions (`--turns`). The ratio is the total time of "train" divided by that of
"plain".

    OMP_NUM_THREADS=1 python -m tools.benchmarks startup
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from diffmegatron import prepare
from tools.benchmarks.json_report import write_json_report
from tools.benchmarks.machine import describe_machine

MODES = ("train", "plain")


def main(arguments: argparse.Namespace) -> None:
    """Measure, print and write the report."""
    taken: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    helped = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.jsonl"
        text.write_text(f'{{"text": "{"a corpus of few words " * 20}"}}\n' * 400)
        prepare([text], folder / "corpus", "bytes", show_progress=False)
        for turn in range(arguments.turns):
            for mode in MODES[:: 1 - 2 * (turn % 2)]:
                taken[mode].append(time_phases(mode, folder))
            helped.append(time_help())
    totals = {mode: [sum(phases.values()) for phases in taken[mode]] for mode in MODES}
    report = {
        "command": "OMP_NUM_THREADS=1 python -m tools.benchmarks startup",
        "machine": describe_machine("cpu"),
        "turns": arguments.turns,
        "cpu_seconds": {
            mode: {name: median(each[name] for each in taken[mode]) for name in taken[mode][0]}
            | {"total": median(totals[mode])}
            for mode in MODES
        },
        "ratio": median(a / b for a, b in zip(totals["train"], totals["plain"], strict=True)),
        "help_cpu_seconds": median(helped),
    }
    write_json_report(arguments.out, report)
    print(json.dumps(report, indent=1))


def median(values: Iterable[float]) -> float:
    """Return the median, rounded to a hundredth."""
    return round(statistics.median(values), 2)


def time_phases(mode: str, folder: Path) -> dict[str, float]:
    """Start a small run in a new process, and return the CPU seconds of each phase by name."""
    code = f"from tools.benchmarks.startup_phases import start; start({mode!r}, {str(folder)!r})"
    process = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    return json.loads(process.stdout.splitlines()[-1])


def time_help() -> float:
    """Run ``diffmegatron --help`` in a new process, and return its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "diffmegatron", "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
