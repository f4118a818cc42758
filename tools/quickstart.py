"""The main job at the size of a laptop: text to a verified Hugging Face export, for both twins.

`make quickstart` runs it; every phase is a command that a user could type. With GPUs it uses them
(NCCL, bf16, one rank per GPU), without it runs two CPU ranks.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from diffmegatron.evaluation.report import TWINS, Twin, write_report

RUNS = Path("runs/quickstart")
CONFIG = "configs/quickstart.yaml"
NOT_TEXT = {"site-packages", "__pycache__", "lib-dynload"}


def main() -> None:
    """Run every phase from the repository's root; stop at the first that fails."""
    if RUNS.exists():
        print(f"removing the previous {RUNS}", flush=True)
        shutil.rmtree(RUNS)
    seconds: dict[str, float] = {}
    run(
        seconds,
        "prepare",
        [
            *cli(),
            "prepare",
            *library_sources(),
            "--pattern",
            "*.py",
            "--output",
            f"{RUNS}/data/stdlib",
            "--tokenizer",
            "bytes",
            "--workers",
            "2",
        ],
    )
    ranks = min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    layout = [f"parallel.tensor={ranks}"]
    if torch.cuda.is_available():
        layout.append("training.precision=bf16")
    for twin in TWINS:
        run(
            seconds,
            f"train {twin}",
            [
                *torchrun(ranks),
                "train",
                CONFIG,
                *layout,
                f"model.attention={twin}",
                f"run_dir={RUNS}/{twin}",
            ],
        )
    for twin in TWINS:
        checkpoint = sorted((RUNS / twin / "checkpoints").iterdir())[-1]
        run(seconds, f"export {twin}", [*cli(), "export", str(checkpoint), f"{RUNS}/{twin}/hf"])
    started = announce("report")
    twins = [Twin(name, RUNS / name, RUNS / name / "hf") for name in TWINS]
    write_report(RUNS, twins, seconds, started)
    print(f"wrote {RUNS}/report.json and {RUNS}/report.png")


def library_sources() -> list[str]:
    """The running Python's standard library: its modules and packages."""
    entries = sorted(Path(sysconfig.get_path("stdlib")).iterdir())
    return [str(e) for e in entries if e.suffix == ".py" or (e.is_dir() and e.name not in NOT_TEXT)]


def cli() -> list[str]:
    """The command line in this environment."""
    return [sys.executable, "-m", "diffmegatron"]


def torchrun(ranks: int) -> list[str]:
    """The command line under torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", "-m", "diffmegatron"]


def run(seconds: dict[str, float], phase: str, command: list[str]) -> None:
    """Run a phase and note how long it took."""
    started = announce(phase)
    # Two ranks on a laptop: more threads than cores would only wait for each other.
    result = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    if result.returncode:
        sys.exit(f"quickstart: phase {phase!r} failed with exit status {result.returncode}")
    seconds[phase] = round(time.perf_counter() - started, 1)


def announce(phase: str) -> float:
    """Print the phase; returns the time it began."""
    print(f"\n== {phase}", flush=True)
    return time.perf_counter()


if __name__ == "__main__":
    main()
