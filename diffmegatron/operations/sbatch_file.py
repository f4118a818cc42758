"""The file that sbatch gets: the ``#SBATCH`` lines of a launch, then the body of ``slurm.sh``."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from diffmegatron.operations.cluster import Cluster, Container
from diffmegatron.own_code import asked_variables

# What a launch keeps in run_dir: the file, Slurm's number of the job, and of a stage its recipe.
JOB_FILE = "job.sh"
JOB_NUMBER = "job_number"
JOB_RECIPE = "job.yaml"
# In the job script what comes before is for those who submit it as it is.
_BEGINNING = "set -uo pipefail\n"


@dataclass(frozen=True)
class Job:
    """What ``launch`` was asked for.

    Attributes:
        name: of the job.
        nodes: how many have ranks.
        cluster: that they are on.
        arguments: of ``diffmegatron train``: the recipe and its overrides.
        folder: absolute; where the job runs, as paths in a recipe are relative to it.
        run_dir: absolute; of the ledger, and for the job's file and its output.
        signal_seconds: before the time limit, when the ranks are told to save.
        dependency: of ``sbatch --dependency``.
        spares: more nodes, each of which takes the place of one that fails.
    """

    name: str
    nodes: int
    cluster: Cluster
    arguments: Sequence[str]
    folder: Path
    run_dir: Path
    signal_seconds: int
    dependency: str | None = None
    spares: int = 0

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.nodes * self.cluster.ranks


def job_file(job: Job) -> str:
    """The whole file, which needs nothing beside it and no arguments."""
    script = files("diffmegatron.operations").joinpath("slurm.sh").read_text()
    body = script[script.index(_BEGINNING) :]
    cluster = job.cluster
    lines = [
        "#!/usr/bin/env bash",
        "# Written by diffmegatron launch. Submit it again: sbatch THIS_FILE",
        *(f"#SBATCH --{option}" for option in _options(job)),
        *cluster.setup,
        *(
            f"export {name}={shlex.quote(text)}"
            for name, text in (cluster.environment | asked_variables()).items()
        ),
        # What a job sees of the submitting shell is no matter of its ranks: they see the job's.
        "export SRUN_EXPORT_ENV=ALL",
        f"within=({shlex.join(_within(cluster.container))})",
        f"srun_options=({shlex.join(_srun_options(cluster.container))})",
        f"spares={job.spares}",
        f"run_dir={shlex.quote(str(job.run_dir))}",
        f"set -- {shlex.join(job.arguments)}",
        "",
    ]
    return "\n".join(lines) + body


def _options(job: Job) -> list[str]:
    cluster = job.cluster
    given = {
        "job-name": job.name,
        "chdir": shlex.quote(str(job.folder)),
        "output": shlex.quote(str(job.run_dir / "job_%j.log")),
        "open-mode": "append",
        "nodes": job.nodes + job.spares,
        "ntasks-per-node": cluster.ranks,
        "cpus-per-task": cluster.cpus_per_rank,
        "gpus-per-node": cluster.gpus_per_node or None,
        "mem": cluster.memory,
        "time": cluster.time_limit,
        "signal": f"USR1@{job.signal_seconds}",
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": ",".join(cluster.exclude) or None,
        "dependency": job.dependency,
        "export": cluster.export,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    flags = {"requeue": True, "exclusive": cluster.exclusive, "no-kill": job.spares > 0}
    return options + [name for name, is_set in flags.items() if is_set]


def _within(container: Container | None) -> list[str]:
    """The command in front of this package's that enters the container."""
    if container is None or container.kind != "apptainer":
        return []
    mounts = [f"--bind={mount}" for mount in container.mounts]
    return ["apptainer", "exec", "--nv", *mounts, container.image]


def _srun_options(container: Container | None) -> list[str]:
    if container is None or container.kind != "pyxis":
        return []
    mounts = ",".join(f"{mount}:{mount}" for mount in container.mounts)
    options = [f"--container-image={container.image}", "--no-container-mount-home"]
    return [*options, *([f"--container-mounts={mounts}"] if mounts else [])]
