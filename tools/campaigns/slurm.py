"""Train on a real Slurm through a month's troubles, and compare with an undisturbed run.

    python -m tools.campaigns.slurm --out docs/results/slurm_campaign.json
    python -m tools.campaigns.slurm --troubles crash hang       # a trial

Slurm must be installed. It runs on this machine only, with four nodes (``slurm_cluster.py``).
``diffmegatron launch`` submits the training of a tiny model on two nodes with two ranks each. The
first run suffers the troubles of ``slurm_troubles.py``, such as crashes and time limits, in a
random order. One trouble is a full disk, so the run_dir is on a small tmpfs; mounting it needs
root. The second run trains as many steps undisturbed. The report tells whether the final weights,
Adam's moments and all losses of both runs are equal to the bit. A table lists the attempts (starts
of the job) and why they ended. The same command with the same ``--folder`` resumes an interrupted
campaign.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml

from diffmegatron.attempts.decision import Cause
from diffmegatron.attempts.ledger import Attempt, Ledger
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.data.prepare.prepare import prepare
from tools.campaigns.faults import damage, machine, same_end
from tools.campaigns.slurm_cluster import Cluster, missing
from tools.campaigns.slurm_troubles import SETTINGS, TROUBLES, ClusterRun
from tools.paths import ROOT

# Size of the run's disk: enough for the preflight checks, in which all ranks write 64 MiB at once,
# and for three checkpoints.
DISK_MIB = 400
# MANY_STEPS: number of steps in the recipe during the troubles, more than the run can reach.
# LAST_STEPS: number of steps that the run trains after its last trouble.
MANY_STEPS, LAST_STEPS = 1_000_000, 20
RECIPE = """
run_dir: {run_dir}
model: {{num_layers: 2, hidden_size: 64, ffn_hidden_size: 96, vocab_size: 320,
        attention: {{kind: diff_v1, num_heads: 4, num_kv_heads: 2}}}}
data: {{tokenizer: bytes, sources: [{{path: {corpus}}}], validation_fraction: 0.2}}
training: {{seq_length: 64, global_batch_size: 8, micro_batch_size: 2, steps: {steps},
           precision: fp32, log_interval: 1, eval_interval: 1000000, eval_batches: 0}}
optimizer: {{lr: 3.0e-3, schedule: {{kind: constant, warmup_steps: 2}}}}
checkpoint: {{interval: 10, keep_last: 3}}
watchdog: {{startup_seconds: 900, step_seconds: 40}}
"""
CLUSTER = {
    "gpus_per_node": 0,
    "ranks_per_node": 2,
    "cpus_per_rank": 1,
    "time_limit": "2:00:00",
    "partition": "main",
    "export": "NONE",
    "environment": {"OMP_NUM_THREADS": "1"},
}


def main() -> None:
    """Run the campaign and write its report.

    The exit status is 0 if both runs ended with the same bits, every attempt ended for an expected
    cause, and every checkpoint could be read; otherwise 1.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=17, help="seed of the order and the moments; default 17"
    )
    parser.add_argument(
        "--troubles", nargs="*", choices=[each.__name__ for each in TROUBLES], help="default: all"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder to keep and to resume from; default: none"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the report; a table .md is written beside it"
    )
    arguments = parser.parse_args()
    # On SIGTERM, leave the context managers below, so that Slurm's processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if reason := missing():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as temporary:
        Path(temporary).chmod(0o755)  # munge's clients must be able to read this folder
        folder = arguments.folder or Path(temporary) / "campaign"
        folder.mkdir(parents=True, exist_ok=True)
        disk = mounted(folder.absolute() / "disk")
        try:
            with Cluster(Path(temporary) / "up", nodes=4, settings=SETTINGS) as cluster:
                report = campaign(folder.absolute(), cluster, arguments)
        finally:
            if arguments.folder is None:
                subprocess.run(["umount", str(disk)], check=True)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
        arguments.out.with_suffix(".md").write_text(table(report))
    sys.exit(0 if report["kept_its_promise"] else 1)


def mounted(path: Path) -> Path:
    """Mount a small tmpfs at a path if it is not mounted yet, and return the path."""
    path.mkdir(exist_ok=True)
    if not path.is_mount():
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path)]
        subprocess.run(command, check=True)
    return path


def campaign(folder: Path, cluster: Cluster, arguments: argparse.Namespace) -> dict:
    """Train with troubles, then undisturbed, and return the report.

    The troubles that are done are recorded in ``done.jsonl``. A resumed campaign skips them.
    """
    corpus, pick = folder / "corpus", random.Random(arguments.seed)
    if not corpus.with_suffix(".json").exists():  # a resumed campaign keeps its corpus
        prepare([ROOT / "diffmegatron"], corpus, "bytes", pattern="*.py", show_progress=False)
    cluster_file = folder / "cluster.yaml"
    here = [f"export PATH={os.environ['PATH']}", f"export PYTHONPATH={ROOT}"]
    cluster_file.write_text(yaml.safe_dump(CLUSTER | {"setup": here}))

    def make_run(run_dir: Path, steps: int) -> ClusterRun:
        recipe = folder / f"{run_dir.name}.yaml"
        recipe.write_text(RECIPE.format(run_dir=run_dir, corpus=corpus, steps=steps))
        return ClusterRun(cluster, recipe, cluster_file, run_dir, pick, say)

    disturbed = make_run(folder / "disk/run", MANY_STEPS)
    plan = [each for each, (_, _, times) in TROUBLES.items() for _ in range(times)]
    if arguments.troubles is not None:
        plan = [each for each in TROUBLES if each.__name__ in arguments.troubles]
    pick.shuffle(plan)
    began, done = time.monotonic(), folder / "done.jsonl"
    recorded = done.read_text().splitlines() if done.exists() else []
    for trouble in plan[len(recorded) :]:
        if not disturbed.is_queued():
            disturbed.launch()
        how = trouble(disturbed, disturbed.over())
        entry = {"trouble": trouble.__name__, "attempts": disturbed.hit, "how": how}
        recorded.append(json.dumps(entry))
        say(f"{len(recorded)} of {len(plan)}: {recorded[-1]}")
        done.write_text("\n".join(recorded) + "\n")
        settled(disturbed)
    steps = shortened(disturbed)
    finish(disturbed)
    seconds = {"disturbed": round(time.monotonic() - began)}
    began, alone = time.monotonic(), make_run(folder / "alone", steps)
    finish(alone)
    seconds["alone"] = round(time.monotonic() - began)
    return reported(alone, disturbed, [json.loads(line) for line in recorded]) | {
        "machine": machine(),
        "seed": arguments.seed,
        "steps": steps,
        "seconds": seconds,
    }


def shortened(run: ClusterRun) -> int:
    """Stop the run, set its final number of steps in its recipe, and return this number.

    The number is ``LAST_STEPS`` more than the run has trained. It cannot be set before, because
    nobody knows how many steps the run trains during the troubles.
    """
    if not run.is_queued():
        run.launch()
    run.trained(run.over())
    run.call("scancel", "--signal=USR1", run.job)
    settled(run)
    newest = run.newest()
    assert newest is not None and newest.last_step is not None
    steps = newest.last_step + LAST_STEPS
    text = run.recipe.read_text()
    run.recipe.write_text(text.replace(f"steps: {MANY_STEPS}", f"steps: {steps}"))
    return steps


def say(text: str) -> None:
    """Print a line with the time on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def settled(run: ClusterRun) -> None:
    """Wait until the attempts that the last trouble hit have ended, or the job left the queue.

    An attempt is one start of the job; its end is read from the run's files.
    """
    run.until(
        lambda: run.ended() >= max(run.hit) or not run.is_queued(),
        f"attempts {run.hit} have ended",
    )


def finish(run: ClusterRun) -> None:
    """Wait until the run has finished; launch it if it is not queued."""
    if not run.is_queued() and not has_finished(run):
        run.launch()
    run.until(lambda: has_finished(run) or not run.is_queued(), "the run ends", 3600)
    if not has_finished(run):
        raise RuntimeError(f"the run did not finish: {run.newest()}")


def has_finished(run: ClusterRun) -> bool:
    """Return whether the newest attempt (start of the job) ended because all steps are done."""
    newest = run.newest()
    return newest is not None and newest.cause == Cause.FINISHED


def reported(alone: ClusterRun, disturbed: ClusterRun, troubles: list[dict]) -> dict:
    """Return the report: the comparison of both runs, and each attempt with its trouble.

    Args:
        alone: undisturbed run.
        disturbed: run with troubles.
        troubles: entries of ``done.jsonl``: each trouble with the attempts that it hit.
    """
    attempts = Ledger(disturbed.run_dir).attempts()
    rows, expected = [], True
    for attempt in attempts:
        trouble = next((each for each in troubles if attempt.number in each["attempts"]), None)
        # If no trouble hit an attempt, it ended because an earlier trouble affected its node, or
        # because this program was interrupted. Any cause is then expected except MISTAKE, which
        # means that a person must correct something.
        kind, causes, how = "", {*Cause} - {Cause.MISTAKE}, ""
        if trouble is not None:
            function = next(each for each in TROUBLES if each.__name__ == trouble["trouble"])
            kind, causes, _ = TROUBLES[function]
            how = trouble["how"]
        expected = expected and attempt.cause in causes
        rows.append({"number": attempt.number, "trouble": kind, "how": how} | _row(attempt))
    store = CheckpointStore(disturbed.run_dir)
    unreadable = [found for step in store.steps() if (found := damage(store, step))]
    equal = same_end(alone.run_dir, disturbed.run_dir)
    return {
        "kept_its_promise": equal and expected and not unreadable,
        "final_state_and_losses_equal_to_the_bit": equal,
        "every_cause_as_expected": expected,
        "listed_checkpoints_that_failed": unreadable,
        "attempts": len(attempts),
        "by_trouble": dict(Counter(row["trouble"] for row in rows if row["trouble"])),
        "by_cause": dict(Counter(str(attempt.cause) for attempt in attempts)),
        "jobs": len({attempt.facts.job for attempt in attempts}),
        "steps_trained": sum(max(0, (a.last_step or 0) - (a.first_step or 0)) for a in attempts),
        "ledger": rows,
    }


def _row(attempt: Attempt) -> dict:
    return {
        "job": attempt.facts.job,
        "nodes": list(attempt.facts.nodes),
        "seconds": round(attempt.seconds),
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "saved": attempt.saved,
        "cause": attempt.cause,
        "reason": attempt.reason,
        "faults_in_a_row": attempt.faults,
        "blamed": list(attempt.hosts),
    }


def table(report: dict) -> str:
    """Return the attempts as a Markdown table.

    A node is shown as the last number of its address, such as 2 for 127.0.0.2.
    """
    lines = [
        "| attempt | job | nodes | what happened | cause in the ledger | steps | saved | s |",
        "|--:|--:|---|---|---|---|--:|--:|",
    ]
    for row in report["ledger"]:
        nodes = ", ".join(node.rsplit(".", 1)[-1] for node in row["nodes"])
        steps = "" if row["last_step"] is None else f"{row['first_step']}-{row['last_step']}"
        cells = [row["number"], row["job"], nodes, row["how"], row["cause"], steps, row["saved"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {row['seconds']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
