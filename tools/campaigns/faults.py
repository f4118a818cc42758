"""Kill a run many times, let torchrun restart it, and compare its result with an undisturbed run.

    python -m tools.campaigns.faults --kills 50 --stops 1 --out fault_campaign.json
    python -m tools.campaigns.faults --kills 1 --steps 120       # a trial
    python -m tools.campaigns.faults --kills 0 --long --out fault_trials.json

Two ranks train a tiny model under ``torchrun --max-restarts``. Again and again a random rank gets
SIGKILL: at a random time, while it starts, or in a phase of a save. With ``--stops`` a random rank
sometimes gets SIGSTOP instead, so that the run hangs until the watchdog ends it. Another run
trains without faults. The report tells whether the final weights, Adam's moments and losses of both
runs are equal to the bit, and lists every checkpoint that failed to verify. ``--long`` adds the
classes of faults in ``fault_trials.py``, each tried many times. With ``--kills 0`` and no stops, no
run is launched.
"""

import argparse
import json
import logging
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from diffmegatron.checkpoint.checkpoint_format import STATE, open_checkpoint
from diffmegatron.checkpoint.checkpoint_manifest import MANIFEST
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.training.monitoring.metrics import read_metrics
from tools.campaigns.fault_trials import run_trials
from tools.paths import ROOT

# The phases of a save, in order, as `save_phase` recognizes them by the files on the disk.
SAVE_PHASES = ("directory made", "ranks writing", "small files", "manifest written", "removal")
# Seconds to wait for a certain phase, which may be too short to be observed. After that time any
# phase of a save is accepted.
PATIENCE_SECONDS = 10

RECIPE = """
run_dir: {run_dir}
model: {{num_layers: 2, hidden_size: 64, ffn_hidden_size: 96, vocab_size: 320,
        attention: {{kind: diff_v1, num_heads: 4, num_kv_heads: 2}}}}
data: {{tokenizer: bytes, sources: [{{path: {corpus}}}], validation_fraction: 0.2}}
training: {{seq_length: 64, global_batch_size: 8, micro_batch_size: 2, steps: {steps},
           precision: fp32, log_interval: 1, eval_interval: 1000000, eval_batches: 0}}
optimizer: {{lr: 3.0e-3, schedule: {{kind: cosine, warmup_steps: 2, final_lr: 3.0e-4}}}}
checkpoint: {{interval: {interval}, keep_last: 3}}
watchdog: {{startup_seconds: {startup}, step_seconds: {step}}}
"""


def main() -> None:
    """Run the campaign and write its report; exit with status 1 unless every fault was survived."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="number of SIGKILLs; default 50")
    parser.add_argument("--stops", type=int, default=0, help="number of SIGSTOPs; default 0")
    parser.add_argument("--steps", type=int, default=400, help="steps of the run; default 400")
    parser.add_argument("--interval", type=int, default=4, help="steps between saves")
    parser.add_argument("--step-seconds", type=float, default=20, help="watchdog limit of a step")
    parser.add_argument(
        "--startup-seconds", type=float, default=300, help="watchdog limit of a start"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=time.time_ns() % 2**32,
        help="seed of the faults; default: the time",
    )
    parser.add_argument(
        "--long", action="store_true", help="also try every class of fault_trials.py"
    )
    parser.add_argument("--out", type=Path, help="file for the report; default: only print it")
    arguments = parser.parse_args()
    report: dict = {"kept_its_promise": True, "machine": machine(), "seed": arguments.seed}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.kills + arguments.stops:
            report = campaign(Path(folder), arguments)
        if arguments.long:
            add_trials(report, Path(folder) / "trials", arguments)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    sys.exit(0 if report["kept_its_promise"] else 1)


def machine() -> str:
    """Return a description of the machine for a report."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}"


def add_trials(report: dict, folder: Path, arguments: argparse.Namespace) -> None:
    """Add the numbers of tried and survived faults to a report, by class.

    The kills and stops under torchrun are also reported as classes. They all count as survived if
    ``kept_its_promise`` of the report is true (see :func:`campaign`); otherwise none of them does.

    Args:
        report: report of :func:`campaign`, or one without kills and stops; it is changed.
        folder: folder to create for the trials.
        arguments: command line.
    """
    logging.disable(logging.WARNING)  # each damaged cache and each full disk logs a warning
    started, kept = time.monotonic(), report["kept_its_promise"]
    classes: dict[str, dict] = {
        kind: {"tried": number, "survived": number if kept else 0}
        for kind, number in report.get("by_kind", {}).items()
    }
    folder.mkdir()
    classes |= run_trials(folder, recipe(folder, "run", arguments), arguments.seed)
    report["classes"] = classes
    report["kept_its_promise"] = all(each["tried"] == each["survived"] for each in classes.values())
    report["trials_seconds"] = round(time.monotonic() - started, 1)


def campaign(folder: Path, arguments: argparse.Namespace) -> dict:
    """Train without faults, then with faults, and return the report.

    ``kept_its_promise`` of the report is true if both runs ended with the same bits, every
    checkpoint that was complete could be read, and all faults were done before the run ended.
    """
    corpus = folder / "corpus"
    prepare([ROOT / "diffmegatron"], corpus, "bytes", pattern="*.py", show_progress=False)
    for name in ("undisturbed", "disturbed"):
        (folder / f"{name}.yaml").write_text(recipe(folder, name, arguments))
    undisturbed = launch(folder / "undisturbed.yaml", restarts=0)
    if undisturbed.wait() != 0:
        raise SystemExit("the undisturbed run failed; see its output above")
    started = time.monotonic()
    faults = arguments.kills + arguments.stops
    # Allow more restarts than faults: on a busy machine a start may fail without a fault, before
    # the ranks have connected.
    disturbed = launch(folder / "disturbed.yaml", restarts=2 * faults + 5)
    done, unreadable = disturb(disturbed, folder / "disturbed", arguments)
    status = disturbed.wait()
    store = CheckpointStore(folder / "disturbed")
    unreadable += [problem for step in store.steps() if (problem := damage(store, step))]
    equal = status == 0 and same_end(folder / "undisturbed", folder / "disturbed")
    stacks = sorted(path.name for path in (folder / "disturbed" / "stacks").glob("rank_*.txt"))
    return {
        "kept_its_promise": bool(equal and not unreadable and len(done) == faults),
        "machine": machine(),
        "seed": arguments.seed,
        "steps": arguments.steps,
        "faults": len(done),
        "by_kind": dict(Counter(f"{kind} {moment}" for kind, moment in done)),
        "torchrun_exit_status": status,
        "final_state_equal_to_the_bit": equal,
        "listed_checkpoints_that_failed": unreadable,
        "stacks_written": stacks,
        "seconds": round(time.monotonic() - started, 1),
    }


def recipe(folder: Path, name: str, arguments: argparse.Namespace) -> str:
    """Return the text of a run's recipe."""
    return RECIPE.format(
        run_dir=folder / name,
        corpus=folder / "corpus",
        steps=arguments.steps,
        interval=arguments.interval,
        startup=arguments.startup_seconds,
        step=arguments.step_seconds,
    )


def launch(file: Path, restarts: int) -> subprocess.Popen:
    """Start a run of two ranks under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    command += ["-m", "diffmegatron", "train", str(file)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        # Seconds that torchrun waits for a rank to end before it kills the rank.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    return subprocess.Popen(command, env=environment, stdout=sys.stderr)


def disturb(
    agent: subprocess.Popen, run_dir: Path, arguments: argparse.Namespace
) -> tuple[list[tuple[str, str]], list[str]]:
    """Kill or stop random ranks until every fault is done or the run ends.

    Returns:
        Two lists. The first has the kind and the moment of every fault. The second has the error of
        each checkpoint that was listed as complete but could not be read.
    """
    pick = random.Random(arguments.seed)
    kinds = ["kill"] * arguments.kills + ["stop"] * arguments.stops
    pick.shuffle(kinds)
    store, done, problems = CheckpointStore(run_dir), [], []
    for kind in kinds:
        # A stopped rank hangs the run until the watchdog's limit. Do not stop a rank while it
        # starts, because the limit of a start is long.
        moments = ["at random"] if kind == "stop" else ["at random", "while starting", "in a save"]
        moment = pick.choices(moments, weights=[4, 2, 4][: len(moments)])[0]
        if moment == "in a save":
            moment = pick.choice(SAVE_PHASES)
        ranks = wait_for_ranks(agent, run_dir, moment, pick)
        if not ranks:
            break
        victim = pick.choice(ranks)
        os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if moment in SAVE_PHASES:
            moment = f"in a save: {save_phase(store) or 'committed'}"
        done.append((kind, moment))
        print(f"{kind} {moment}: {len(done)} of {len(kinds)}", file=sys.stderr, flush=True)
        problems += [found for step in store.steps() if (found := damage(store, step))]
        while agent.poll() is None and Path(f"/proc/{victim}").exists():
            time.sleep(0.05)
    return done, problems


def wait_for_ranks(
    agent: subprocess.Popen, run_dir: Path, moment: str, pick: random.Random
) -> list[int]:
    """Wait for the moment of a fault.

    Args:
        agent: torchrun's process.
        run_dir: folder of the run.
        moment: one of three kinds of moments. "while starting": up to 6 seconds after both ranks
            exist. "at random": up to 1 second after a new step. One of ``SAVE_PHASES``: this phase
            of a save after a new step; if it is not seen within ``PATIENCE_SECONDS``, any phase.
        pick: source of random delays.

    Returns:
        The process ids of both ranks; empty if the run has ended.
    """
    began, store = time.time(), CheckpointStore(run_dir)
    patience, going_on = time.monotonic() + PATIENCE_SECONDS, False
    while agent.poll() is None:
        ranks = children(agent.pid)
        if len(ranks) == 2:
            going_on = going_on or stepped_since(run_dir, began)
            if moment == "while starting" or (going_on and moment == "at random"):
                time.sleep(pick.uniform(0, 6 if moment == "while starting" else 1))
                if ranks := children(agent.pid):
                    return ranks
            elif going_on and moment in SAVE_PHASES:
                seen = save_phase(store)
                if seen == moment or (seen and time.monotonic() > patience):
                    return ranks
        time.sleep(0.0002 if moment in SAVE_PHASES else 0.02)
    return []


def save_phase(store: CheckpointStore) -> str | None:
    """Return the phase of the save in progress, derived from its files; None if there is no save.

    The result is one of ``SAVE_PHASES``. The last phase is the removal of an old checkpoint.
    """
    try:
        names = [path.name for path in store.directory.iterdir()]
        if any(name.endswith(".removed") for name in names):
            return "removal"
        unfinished = next((name for name in names if name.endswith(".unfinished")), None)
        if unfinished is None:
            return None
        files = {path.name for path in (store.directory / unfinished).iterdir()}
    except FileNotFoundError:  # the save has renamed or removed files in the meantime
        return None
    if MANIFEST in files:
        return "manifest written"
    if STATE in files:
        return "small files"
    return "ranks writing" if files else "directory made"


def stepped_since(run_dir: Path, moment: float) -> bool:
    """Return whether the run has trained a step since a time.

    The newest entry of its metrics is compared with the time. A restart writes the entries of
    earlier steps again, but with their old times, so they do not count as new steps.

    Args:
        run_dir: folder of the run.
        moment: time in seconds since 1970.
    """
    return any(entry["time"] > moment for entry in read_metrics(run_dir)[-1:])


def children(parent: int) -> list[int]:
    """Return the ids of a process's child processes."""
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def damage(store: CheckpointStore, step: int) -> str | None:
    """Return the error of a damaged checkpoint; None if it is valid or was removed."""
    try:
        open_checkpoint(store.path(step))
    except ValueError as error:
        # The run's retention policy may have removed the checkpoint since it was listed.
        return str(error) if store.path(step).exists() else None
    return None


def same_end(one: Path, other: Path) -> bool:
    """Return whether two runs have the same final weights, moments and losses, to the bit."""
    newest = [CheckpointStore(run).latest() for run in (one, other)]
    ends = [open_checkpoint(path).tensors for path in newest if path is not None]
    curves = [
        [(e["step"], e["train/loss"]) for e in read_metrics(run) if "train/loss" in e]
        for run in (one, other)
    ]
    return (
        len(ends) == 2
        and curves[0] == curves[1]
        and all(
            torch.equal(ends[0].read_tensor(kind, name), ends[1].read_tensor(kind, name))
            for kind in ("weight", "exp_avg", "exp_avg_sq")
            for name in ends[0].names()
        )
    )


if __name__ == "__main__":
    main()
