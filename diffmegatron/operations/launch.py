"""``diffmegatron launch``: check a run, write its job file and submit it to Slurm.

An attempt is one start of a job's ranks. The ledger is the record of all attempts in ``run_dir``.
"""

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
from diffmegatron.files import explain_os_errors, format_path, shorten, write_durably
from diffmegatron.operations.cluster import Cluster, load_cluster
from diffmegatron.operations.recipe_checks import (
    check_fit,
    check_starts,
    check_time_limit,
    data_remarks,
)
from diffmegatron.operations.sbatch_file import (
    JOB_FILE,
    JOB_NUMBER,
    JOB_RECIPE,
    Job,
    job_file,
    read_job_number,
)
from diffmegatron.operations.status import examine_run
from diffmegatron.plan import Plan, plan_recipe
from diffmegatron.plan.rank_layout import nodes_in_words, ranks_in_words
from diffmegatron.training.monitoring.metrics import newest_entries
from diffmegatron.training.safeguards import too_long_for_kill_wait

# Seconds between SIGUSR1 and the time limit if no save of this run has been measured yet.
_SIGNAL_SECONDS = 600
# Seconds in addition to the measured time of saves and steps.
_SLACK_SECONDS = 60
_COMMAND_SECONDS = 60
_ERROR_PREFIX = re.compile("^sbatch: (error|fatal): ")


@dataclass(frozen=True)
class Submission:
    """A checked job that can be submitted.

    Attributes:
        text: text of the job file.
        path: absolute path of the job file.
        plans: one plan per training stage; empty if the cluster file names no GPU.
        remarks: warnings for the user.
        recipe: recipe to write beside the job file; None: the job reads the user's file.
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
    *,
    needs_data: bool = True,
) -> Submission:
    """Check a recipe against a cluster and prepare its job; nothing is written.

    Args:
        nodes: number of nodes with ranks.
        dependency: value of ``sbatch --dependency``.
        spares: number of additional nodes that can replace failed nodes.
        needs_data: whether sources of the recipe that are not prepared are an error; otherwise,
            they are a remark.
    """
    recipes = load_stages(config, overrides)
    cluster = load_cluster(cluster_file)
    _check(recipes, nodes, cluster, dependency, needs_data)
    return _launch(recipes, (str(config), *overrides), nodes, cluster, dependency, spares)


def prepare_chain(
    config: Path,
    overrides: Sequence[str],
    nodes: int,
    cluster_file: Path,
    dependency: str | None = None,
    spares: int = 0,
    *,
    needs_data: bool = True,
) -> tuple[Submission, ...]:
    """Check a recipe as :func:`prepare_launch` does, and prepare one job per unfinished stage.

    ``dependency`` applies only to the first job. Each later job waits for the job before it.
    """
    recipes = load_stages(config, overrides)
    cluster = load_cluster(cluster_file)
    if len(recipes) == 1:
        raise UserError(
            f"{format_path(config)} has no stages, and --chain submits a job per stage; leave "
            "--chain out"
        )
    _check(recipes, nodes, cluster, dependency, needs_data)
    left = [recipe for recipe in recipes if not _is_finished(ledger_of([recipe]))]
    if not left:
        raise UserError(f"all stages of {format_path(config)} are finished; give another run_dir")
    launches = []
    for recipe in left:
        check_free(ledger_of([recipe]))
        file = Path(recipe.run_dir).absolute() / JOB_RECIPE
        waits_for = dependency if recipe is left[0] else None
        launch = _launch([recipe], (str(file),), nodes, cluster, waits_for, spares)
        launches.append(replace(launch, recipe=dump_recipe(recipe)))
    return tuple(launches)


def _check(
    recipes: Sequence[Recipe],
    nodes: int,
    cluster: Cluster,
    dependency: str | None,
    needs_data: bool,
) -> None:
    check_time_limit(recipes, cluster)
    check_fit(recipes, nodes, cluster, needs_data=needs_data)
    # A job that this job waits for may still write the initial checkpoint.
    if dependency is None:
        check_starts(recipes)
    check_free(ledger_of(recipes))


def _launch(
    recipes: Sequence[Recipe],
    arguments: tuple[str, ...],
    nodes: int,
    cluster: Cluster,
    dependency: str | None,
    spares: int,
) -> Submission:
    plans: tuple[Plan, ...] = ()
    if cluster.gpu is not None:
        ranks = nodes * cluster.ranks
        plans = tuple(plan_recipe(recipe, ranks, cluster.gpu) for recipe in recipes)
    folder = ledger_of(recipes).run_dir.absolute()
    save, step = _measured_seconds(recipes)
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
    """Write the job's files into ``run_dir``, submit the job, and return its Slurm ID.

    ``after`` is the Slurm ID of a job that must finish first. If that job fails, Slurm cancels this
    job.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine; go to a login node, or submit the output of "
            "--dry-run there, or give --torchrun on machines without Slurm"
        )
    dependency = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    with explain_os_errors(f"cannot write in {format_path(launch.path.parent)}"):
        write_files(launch)
        number = _sbatch(launch.path, [] if after is None else dependency)
        write_durably(launch.path.with_name(JOB_NUMBER), f"{number}\n".encode())
    return number


def submit_chain(launches: Sequence[Submission]) -> list[str]:
    """Submit jobs that run one after another, and return their Slurm IDs.

    If a job cannot be submitted, the jobs before it are cancelled.
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


def log_path(run_dir: Path, number: str) -> Path:
    """Return the file that Slurm writes the output of a job to; ``run_dir`` is the job's folder."""
    return run_dir / f"job_{number}.log"


def write_files(launch: Submission) -> None:
    """Write the job file into ``run_dir``, and the recipe if ``launch.recipe`` is set."""
    launch.path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(launch.path, os.fsencode(launch.text))
    if launch.recipe is not None:
        write_durably(launch.path.with_name(JOB_RECIPE), launch.recipe.encode())


def _is_finished(ledger: Ledger) -> bool:
    attempts = ledger.attempts()
    return bool(attempts) and attempts[-1].cause == Cause.FINISHED


def check_free(ledger: Ledger) -> None:
    """Check that no running or queued job uses a ``run_dir``, and that its run is unfinished."""
    queue = _queue()
    number = read_job_number(ledger.run_dir)
    if queue is not None and number is not None and number in queue:
        raise UserError(
            f"{format_path(ledger.run_dir)} has job {shorten(number)}, which is "
            f"{queue[number].lower()}; wait for its end, scancel it, or give another run_dir"
        )
    if ledger.attempts():
        found = examine_run(ledger.run_dir)
        last = found.attempts[-1]
        if last.cause == Cause.FINISHED:
            raise UserError(f"{format_path(ledger.run_dir)} is finished; give another run_dir")
        # The ledger still shows a job as running right after it was cancelled, but Slurm's queue
        # does not.
        has_left = queue is not None and last.facts.job != "" and last.facts.job not in queue
        if found.exit_status == 0 and not has_left:
            raise UserError(
                f"{format_path(ledger.run_dir)} is used by job {last.facts.job or '(unknown)'}: "
                f"{found.state}; wait for its end, or give another run_dir"
            )


def _queue() -> dict[str, str] | None:
    """Return the state of each job in Slurm's queue, by Slurm ID; None if squeue fails."""
    output = _output("squeue", "--noheader", "--format=%A %T")
    if output is None:
        return None
    return dict(line.split(maxsplit=1) for line in output.splitlines() if " " in line.strip())


def _measured_seconds(recipes: Sequence[Recipe]) -> tuple[float | None, float]:
    """Return the seconds of the longest recorded save, and the seconds of a step.

    The latter are the median of the slowest stage. The first is None if no save is recorded, and
    the second is 0 if no speed is recorded.
    """
    saves, step = list[float](), 0.0
    for recipe in recipes:
        entries = newest_entries(Path(recipe.run_dir))
        saves += [e["ckpt/total_seconds"] for e in entries if "ckpt/total_seconds" in e]
        speeds = [speed for e in entries if (speed := e.get("perf/tokens_per_second", 0)) > 0]
        if speeds:
            step = max(step, recipe.training.tokens_per_step / statistics.median(speeds))
    return max(saves, default=None), step


def _signal_seconds(save: float | None, step: float, cluster: Cluster) -> int:
    """Return how many seconds before the job's time limit Slurm sends SIGUSR1.

    If no save was measured, the result is ``_SIGNAL_SECONDS``. Otherwise, it is enough for two
    saves and two steps. The result is at most half of the time limit.
    """
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
            "new job may use it again; add it to exclude in the cluster file if it is still bad"
        )
    wait = _kill_wait()
    if save is not None and wait is not None and save > wait:
        remarks.append(too_long_for_kill_wait(save, wait))
    return tuple(remarks)


def _kill_wait() -> int | None:
    if shutil.which("scontrol") is None:
        return None
    config = _output("scontrol", "show", "config") or ""
    found = [line.split("=")[1].split()[0] for line in config.splitlines() if "KillWait" in line]
    return int(found[0]) if found and found[0].isdecimal() else None


def _sbatch(path: Path, options: Sequence[str]) -> str:
    command = ["sbatch", "--parsable", *options, str(path)]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"sbatch did not end within {_COMMAND_SECONDS} s; check Slurm with sinfo"
        ) from None
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(f"Slurm rejects the job: {shorten(_ERROR_PREFIX.sub('', lines[-1]))}")
    return result.stdout.strip().split(";")[0]


def _output(*command: str) -> str | None:
    """Return the standard output of a command; None if the command fails or is not installed."""
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=_COMMAND_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout


def summary(launch: Submission) -> list[str]:
    """Return lines for the user that describe the resources of a job."""
    job, lines = launch.job, []
    size = f"{nodes_in_words(job.nodes)}, {ranks_in_words(job.ranks)}"
    for plan in launch.plans:
        attempts = math.ceil(plan.time.days * 86_400 / job.cluster.seconds)
        lines.append(
            f"{plan.run_dir}: {size}, "
            f"{plan.largest_stage.total / 2**30:.1f} GiB per rank; an estimate of "
            f"{plan.time.days:.1f} days and {plan.time.days * 24 * job.ranks:,.0f} GPU-hours, "
            f"in {attempts} attempt{'s' if attempts > 1 else ''} of {job.cluster.time_limit}"
        )
    if not launch.plans:
        lines.append(f"{size}; no estimate without a GPU name")
    if job.spares:
        lines.append(f"{job.nodes + job.spares} nodes are requested, {job.spares} of them spare")
    lines.append(f"SIGUSR1 {job.signal_seconds} s before the time limit")
    return lines
