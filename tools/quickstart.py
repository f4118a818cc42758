"""The main job at the size of a laptop: text to a verified Hugging Face export, for both twins.

`make quickstart` runs it; every phase is a command that a user could type. With GPUs it uses them
(NCCL, bf16, one rank per GPU), without it runs two CPU ranks. Arguments are overrides of the
recipe, such as `training.steps=1000`.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from diffmegatron.cli import quiet_libraries

RUNS = Path("runs/quickstart")
CONFIG = Path(__file__).parent.parent / "configs/quickstart.yaml"
NOT_TEXT = {"site-packages", "__pycache__", "lib-dynload"}
CLI = ["-m", "diffmegatron"]


def main() -> None:
    """Run every phase, into the present directory; stop at the first that fails."""
    quiet_libraries()
    from diffmegatron.evaluation.report import TWINS, Twin, write_report

    if any("=" not in argument for argument in sys.argv[1:]):
        sys.exit(f"{__doc__}\nusage: python tools/quickstart.py [KEY=VALUE ...]")
    if RUNS.exists():
        print(f"removing the previous {RUNS}", flush=True)
        shutil.rmtree(RUNS)
    seconds: dict[str, float] = {}
    corpus = f"{RUNS}/data/stdlib"
    reading = ["--pattern", "*.py", "--tokenizer", "bytes", "--workers", "2", "--output", corpus]
    run(seconds, "prepare", *CLI, "prepare", *library_sources(), *reading)
    for twin in TWINS:
        chosen = [f"model.attention={twin}", f"run_dir={RUNS}/{twin}"]
        run(seconds, f"train {twin}", *torchrun(), "train", str(CONFIG), *overrides(), *chosen)
    for twin in TWINS:
        checkpoint = max((RUNS / twin / "checkpoints").glob("step_????????"))
        run(seconds, f"export {twin}", *CLI, "export", str(checkpoint), f"{RUNS}/{twin}/hf")
    started = announce("report")
    twins = [Twin(name, RUNS / name, RUNS / name / "hf") for name in TWINS]
    write_report(RUNS, twins, seconds, started)
    print(f"wrote {RUNS}/report.json and {RUNS}/report.png")


def library_sources() -> list[str]:
    """The running Python's standard library: its modules and packages."""
    entries = sorted(Path(sysconfig.get_path("stdlib")).iterdir())
    return [str(e) for e in entries if e.suffix == ".py" or (e.is_dir() and e.name not in NOT_TEXT)]


def ranks() -> int:
    """Two at most: one per GPU, or per core of a laptop."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def overrides() -> list[str]:
    """What this machine and the user change of the recipe."""
    precision = ["training.precision=bf16"] if torch.cuda.is_available() else []
    return [f"parallel.tensor={ranks()}", *precision, *sys.argv[1:]]


def torchrun() -> list[str]:
    """The command line under torchrun."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks()}", *CLI]


def run(seconds: dict[str, float], phase: str, *arguments: str) -> None:
    """Run a phase in this Python and note how long it took."""
    started = announce(phase)
    # Two ranks on a laptop: more threads than cores would only wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *arguments], env=environment, check=False)
    if result.returncode:
        sys.exit(f"quickstart: phase {phase!r} failed with exit status {result.returncode}")
    seconds[phase] = round(time.perf_counter() - started, 1)


def announce(phase: str) -> float:
    """Print the phase; returns the time it began."""
    print(f"\n== {phase}", flush=True)
    return time.perf_counter()


if __name__ == "__main__":
    main()
