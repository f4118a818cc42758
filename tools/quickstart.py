"""The main job at the size of a laptop: text to verified Hugging Face exports of several runs.

`make quickstart` runs it; every phase is a command that a user could type. With GPUs it uses them
(NCCL, bf16, one rank per GPU), without it runs two CPU ranks.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

from diffmegatron.attention.variants import VARIANTS
from diffmegatron.cli import quiet_libraries

RUNS = Path("runs/quickstart")
CONFIG = Path(__file__).parent.parent / "configs/quickstart.yaml"
PAIR = ("diff_v1", "softmax")
NOT_TEXT = {"site-packages", "__pycache__", "lib-dynload"}
CLI = ["-m", "diffmegatron"]


def main() -> None:
    """Run every phase, into the present directory; stop at the first that fails."""
    quiet_libraries()
    from diffmegatron.evaluation.run_report import Run, write_report

    arguments = parse_arguments()
    if RUNS.exists():
        print(f"removing the previous {RUNS}", flush=True)
        shutil.rmtree(RUNS)
    seconds: dict[str, float] = {}
    corpus = f"{RUNS}/data/stdlib"
    reading = ["--pattern", "*.py", "--tokenizer", "bytes", "--workers", "2", "--output", corpus]
    run(seconds, "prepare", *CLI, "prepare", *library_sources(), *reading)
    names = {choice.partition(",")[0]: choice for choice in arguments.attention or PAIR}
    for name, choice in names.items():
        chosen = [*overrides(arguments.overrides), *attention(choice), f"run_dir={RUNS}/{name}"]
        run(seconds, f"train {name}", *torchrun(), "train", str(CONFIG), *chosen)
    for name in names:
        run(seconds, f"export {name}", *CLI, "export", f"{RUNS}/{name}", f"{RUNS}/{name}/hf")
    started = announce("report")
    write_report(RUNS, [Run(n, RUNS / n, RUNS / n / "hf") for n in names], seconds, started)
    print(f"wrote {RUNS}/report.json and {RUNS}/report.png")


def parse_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--attention",
        action="append",
        metavar="KIND[,KEY=VALUE...]",
        help=f"a run with attention of this kind, of {', '.join(VARIANTS)}, and keys of its "
        "section, such as grouped,signal_per_noise=2; may be given several times; default: "
        f"{' and '.join(PAIR)}",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="of the recipe, for every run, such as training.steps=1000",
    )
    arguments = parser.parse_args()
    if wrong := [each for each in arguments.overrides if "=" not in each]:
        parser.error(f"{wrong[0]!r} is not of the form KEY=VALUE")
    for choice in arguments.attention or []:
        kind, *keys = choice.split(",")
        if kind not in VARIANTS or not all("=" in key for key in keys):
            parser.error(
                f"--attention {choice!r} is not of the form KIND[,KEY=VALUE...] with a kind of "
                f"{', '.join(VARIANTS)}"
            )
    return arguments


def attention(choice: str) -> list[str]:
    """The overrides of ``KIND[,KEY=VALUE...]``."""
    kind, *keys = choice.split(",")
    return [f"model.attention.kind={kind}", *(f"model.attention.{key}" for key in keys)]


def library_sources() -> list[str]:
    """The running Python's standard library: its modules and packages."""
    entries = sorted(Path(sysconfig.get_path("stdlib")).iterdir())
    return [str(e) for e in entries if e.suffix == ".py" or (e.is_dir() and e.name not in NOT_TEXT)]


def ranks() -> int:
    """Two at most: one per GPU, or per core of a laptop."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def overrides(given: list[str]) -> list[str]:
    """What this machine and the user change of the recipe."""
    precision = ["training.precision=bf16"] if torch.cuda.is_available() else []
    return [f"parallel.tensor={ranks()}", *precision, *given]


def torchrun() -> list[str]:
    """The command line under torchrun, also where this machine's name is in no DNS."""
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks()}"]
    return ["-m", "torch.distributed.run", *options, *CLI]


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
