"""``diffmegatron launch``: everything that can be wrong is told before a job is submitted."""

import math
import os
import re
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from diffmegatron.attempts.decision import Cause
from diffmegatron.attempts.ledger import Ledger, bad_hosts, ledger_of
from diffmegatron.config.load import dump_recipe, load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_text, reason, shown, write_durably
from diffmegatron.operations.cluster import Cluster, load_cluster
from diffmegatron.operations.recipe_checks import check_fit, check_starts, data_remarks
from diffmegatron.operations.sbatch_file import JOB_FILE, JOB_NUMBER, JOB_RECIPE, Job, job_file
from diffmegatron.operations.status import examine
from diffmegatron.plan import Plan, plan_recipe
from diffmegatron.training.monitoring.metrics import newest_entries
from diffmegatron.training.saving.save_time import too_long_for_kill_wait

# Slurm may send the signal up to a minute early, never late.
_SIGNAL_SECONDS = 600
_SLACK_SECONDS = 60
_ANSWER_SECONDS = 60
_SPEAKER = re.compile("^sbatch: (error|fatal): ")


@dataclass(frozen=True)
class Submission:
    """A job that may be submitted.

    Attributes:
        job: what was asked for.
        text: of the file.
        path: where it is kept.
        plans: of every stage; empty where the cluster names no GPU.
        remarks: sentences for whoever submits it.
        recipe: resolved, kept beside the file; None: the job reads the one that was given.
    """

    job: Job
    text: str
    path: Path
    plans: tuple[Plan, ...]
    remarks: tuple[str, ...]
    recipe: str | None = None


def prepare_launch(
    config: Path,
    overrides: Sequence[str],
    nodes: int,
    cluster_file: Path,
    dependency: str | None = None,
    spares: int = 0,
) -> Submission:
    """Check a recipe and a cluster against each other, and write nothing.

    Raises:
        UserError: the recipe, the cluster's file, the data, the layout or the container are not
            what they should be, or a job is at work in ``run_dir``.
    """
    recipes = load_stages(config, overrides)
    cluster = load_cluster(cluster_file)
    check_fit(recipes, nodes, cluster)
    if dependency is None:  # the job before may write the checkpoint
        check_starts(recipes)
    check_free(ledger_of(recipes))
    return _launch(recipes, (str(config), *overrides), nodes, cluster, dependency, spares)


def prepare_chain(
    config: Path,
    overrides: Sequence[str],
    nodes: int,
    cluster_file: Path,
    dependency: str | None = None,
    spares: int = 0,
) -> tuple[Submission, ...]:
    """The same with a job for each stage of a recipe; those that are finished are left out.

    Each job has its stage's ``run_dir``, and in it the stage as a recipe of its own.

    Raises:
        UserError: as :func:`prepare_launch`, or the recipe has no stages, or none to be trained.
    """
    recipes = load_stages(config, overrides)
    cluster = load_cluster(cluster_file)
    if len(recipes) == 1:
        raise UserError(
            f"{shown(config)} is one run, and --chain makes a job of each stage; leave it out"
        )
    check_fit(recipes, nodes, cluster)
    if dependency is None:  # the job before may write the checkpoint
        check_starts(recipes)
    check_free(ledger_of(recipes))
    left = [recipe for recipe in recipes if not _is_finished(ledger_of([recipe]))]
    if not left:
        raise UserError(f"all stages of {shown(config)} are finished; give another run_dir")
    launches = []
    for recipe in left:
        check_free(ledger_of([recipe]))
        file = Path(recipe.run_dir).absolute() / JOB_RECIPE
        waits_for = dependency if recipe is left[0] else None
        launch = _launch([recipe], (str(file),), nodes, cluster, waits_for, spares)
        launches.append(replace(launch, recipe=dump_recipe(recipe)))
    return tuple(launches)


def _launch(
    recipes: Sequence[Recipe],
    arguments: tuple[str, ...],
    nodes: int,
    cluster: Cluster,
    dependency: str | None,
    spares: int,
) -> Submission:
    gpus = [] if cluster.gpu is None else [cluster.gpu]
    ranks = nodes * cluster.ranks
    plans = tuple(plan_recipe(recipe, ranks, gpu) for gpu in gpus for recipe in recipes)
    folder = ledger_of(recipes).run_dir.absolute()
    save, step = _measured(recipes)
    job = Job(
        name=folder.name,
        nodes=nodes,
        cluster=cluster,
        arguments=arguments,
        folder=Path.cwd(),
        run_dir=folder,
        signal_seconds=_signal_seconds(save, step, cluster),
        dependency=dependency,
        spares=spares,
    )
    remarks = _remarks(save, recipes, job, plans)
    return Submission(job, job_file(job), folder / JOB_FILE, plans, remarks)


def submit(launch: Submission, after: str | None = None) -> str:
    """Write the job's file into ``run_dir`` and submit it.

    Args:
        launch: of the job.
        after: number of the job that must have finished before; where it ends otherwise this one
            is cancelled.

    Returns:
        The job's number.

    Raises:
        UserError: it cannot be written, there is no Slurm here, or it refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine; go to a login node, or give --dry-run and submit "
            "what it prints, or give --torchrun on machines without Slurm"
        )
    waits = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    try:
        write_files(launch)
        number = _sbatch(launch.path, [] if after is None else waits)
        write_durably(launch.path.with_name(JOB_NUMBER), f"{number}\n".encode())
    except OSError as error:
        raise UserError(f"cannot write in {shown(launch.path.parent)}: {reason(error)}") from None
    return number


def submit_chain(launches: Sequence[Submission]) -> list[str]:
    """Submit jobs of which each waits until the one before has finished.

    Returns:
        Their numbers.

    Raises:
        UserError: as :func:`submit`; those that were submitted before are cancelled.
    """
    numbers: list[str] = []
    for launch in launches:
        try:
            numbers.append(submit(launch, after=numbers[-1] if numbers else None))
        except UserError:
            if numbers:
                _output("scancel", *numbers)
            raise
    return numbers


def write_files(launch: Submission) -> None:
    """Write what the job reads into its ``run_dir``.

    Raises:
        OSError: it cannot be written.
    """
    launch.path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(launch.path, os.fsencode(launch.text))
    if launch.recipe is not None:
        write_durably(launch.path.with_name(JOB_RECIPE), launch.recipe.encode())


def _is_finished(ledger: Ledger) -> bool:
    attempts = ledger.attempts()
    return bool(attempts) and attempts[-1].cause == Cause.FINISHED


def check_free(ledger: Ledger) -> None:
    """Refuse a ``run_dir`` in which a job is at work or is going to be.

    Raises:
        UserError: there is one, or the run is finished.
    """
    queue = _queue()
    path = ledger.run_dir / JOB_NUMBER
    number = read_text(path, max_bytes=100).strip() if path.exists() else ""
    if queue is not None and number in queue:
        raise UserError(
            f"{shown(ledger.run_dir)} has job {clipped(number)}, {queue[number].lower()}; let it "
            "end, scancel it, or give another run_dir"
        )
    if ledger.attempts():
        found = examine(ledger.run_dir)
        last = found.attempts[-1]
        if last.cause == Cause.FINISHED:
            raise UserError(f"{shown(ledger.run_dir)} is finished; give another run_dir")
        # A job that was cancelled a moment ago still looks alive in its ledger.
        has_left = queue is not None and last.facts.job != "" and last.facts.job not in queue
        if found.exit_status == 0 and not has_left:
            raise UserError(
                f"{shown(ledger.run_dir)} has a job at work, {last.facts.job or 'unknown'}: "
                f"{found.state}; let it end, or give another run_dir"
            )


def _queue() -> dict[str, str] | None:
    """The states of all jobs that Slurm has, by number; None: it does not say."""
    said = _output("squeue", "--noheader", "--format=%A %T")
    if said is None:
        return None
    return dict(line.split(maxsplit=1) for line in said.splitlines() if " " in line.strip())


def _measured(recipes: Sequence[Recipe]) -> tuple[float | None, float]:
    """Seconds of the longest save that the newest metrics tell of, and of a step."""
    entries = [entry for recipe in recipes for entry in newest_entries(Path(recipe.run_dir))]
    saves = [e["ckpt/total_seconds"] for e in entries if "ckpt/total_seconds" in e]
    steps = [
        recipe.training.tokens_per_step / entry["perf/tokens_per_second"]
        for recipe in recipes[-1:]
        for entry in entries
        if entry.get("perf/tokens_per_second", 0) > 0
    ]
    return max(saves, default=None), statistics.median(steps) if steps else 0.0


def _signal_seconds(save: float | None, step: float, cluster: Cluster) -> int:
    """Two saves and two steps before the end; ten minutes while none has been measured."""
    measured = round(2 * (save or 0) + 2 * step) + _SLACK_SECONDS
    return min(_SIGNAL_SECONDS if save is None else measured, cluster.seconds // 2)


def _remarks(
    save: float | None, recipes: Sequence[Recipe], job: Job, plans: Sequence[Plan]
) -> tuple[str, ...]:
    remarks = [warning for plan in plans for warning in plan.warnings]
    remarks += [remark for recipe in recipes for remark in data_remarks(recipe)]
    margin = max(recipe.checkpoint.time_limit_margin for recipe in recipes)
    if margin > job.cluster.seconds / 2:
        remarks.append(
            f"checkpoint.time_limit_margin {margin:g} is more than half of the time limit "
            f"{job.cluster.time_limit}"
        )
    if bad := set(bad_hosts(ledger_of(recipes).attempts())) - set(job.cluster.exclude):
        remarks.append(
            f"{', '.join(sorted(bad))} failed or slowed down two of the last ten attempts, and a "
            "new job does not know; add to exclude in the cluster's file what is still no good"
        )
    wait = _kill_wait()
    if save is not None and wait is not None and save > wait:
        remarks.append(too_long_for_kill_wait(save, wait))
    return tuple(remarks)


def _kill_wait() -> int | None:
    if shutil.which("scontrol") is None:
        return None
    said = _output("scontrol", "show", "config") or ""
    found = [line.split("=")[1].split()[0] for line in said.splitlines() if "KillWait" in line]
    return int(found[0]) if found and found[0].isdecimal() else None


def _sbatch(path: Path, options: Sequence[str]) -> str:
    command = ["sbatch", "--parsable", *options, str(path)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"Slurm has not answered within {_ANSWER_SECONDS} s; see sinfo") from None
    if result.returncode:
        said = result.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(f"Slurm refuses the job: {clipped(_SPEAKER.sub('', said[-1]))}")
    return result.stdout.strip().split(";")[0]


def _output(*command: str) -> str | None:
    """What a command prints; None: it failed, which here is an answer as well."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_ANSWER_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def summary(launch: Submission) -> list[str]:
    """What the job takes, a line each."""
    job, lines = launch.job, []
    for plan in launch.plans:
        attempts = math.ceil(plan.time.days * 86_400 / job.cluster.seconds)
        lines.append(
            f"{plan.run_dir}: {job.nodes} nodes, {job.ranks} ranks, "
            f"{plan.heaviest.total / 2**30:.1f} GiB per rank; an estimate of {plan.time.days:.1f} "
            f"days and {plan.time.days * 24 * job.ranks:,.0f} GPU-hours, in {attempts} "
            f"attempt{'s' if attempts > 1 else ''} of {job.cluster.time_limit}"
        )
    if not launch.plans:
        lines.append(f"{job.nodes} nodes, {job.ranks} ranks; no estimate without a GPU's name")
    if job.spares:
        lines.append(f"{job.nodes + job.spares} nodes are asked for, {job.spares} of them spare")
    lines.append(f"SIGUSR1 {job.signal_seconds} s before the time limit")
    return lines
