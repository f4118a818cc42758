"""Job file for sbatch: ``#SBATCH`` lines and settings, then the body of launch/slurm.sh."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.files import read_text, shorten
from diffmegatron.operations.cluster import Cluster, Container, export_line
from diffmegatron.own_code import import_environment
from diffmegatron.shipped_files import shipped_folder

# Files in run_dir.
JOB_FILE = "job.sh"
JOB_NUMBER = "job_number"  # Slurm ID of the submitted job
JOB_RECIPE = "job.yaml"  # recipe of a training stage that has its own job (launch --chain)
_MAX_NUMBER_BYTES = 100
# The lines of slurm.sh before this line are defaults, which the job file replaces.
_BODY_START = "set -uo pipefail\n"
# Options with which the job script would start other ranks, or none, or could not requeue the job.
_INCOMPATIBLE = (
    *(
        "array",
        "error",
        "gpus",
        "gpus-per-task",
        "hold",
        "mem-per-cpu",
        "mem-per-gpu",
        "no-requeue",
    ),
    *("ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "parsable", "test-only"),
    *("wait", "wrap"),
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class Job:
    """A job as requested by the user.

    Attributes:
        nodes: number of nodes with ranks.
        arguments: arguments of ``diffmegatron train``: the recipe and its overrides.
        folder: absolute working directory.
        run_dir: absolute folder of the job file, the job's output and the record of its attempts.
        signal_seconds: seconds before the time limit at which Slurm sends SIGUSR1.
        dependency: value of ``sbatch --dependency``.
        spares: number of additional nodes that replace failed ones.
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
        """Number of ranks of the job."""
        return self.nodes * self.cluster.ranks


def job_file(job: Job) -> str:
    """Return the text of a job file, which sbatch can submit without arguments or other scripts."""
    script = (shipped_folder("launch") / "slurm.sh").read_text()
    body = script[script.index(_BODY_START) :]
    cluster = job.cluster
    lines = [
        "#!/usr/bin/env bash",
        "# Written by diffmegatron launch. Submit it again: sbatch THIS_FILE",
        *(f"#SBATCH --{option}" for option in _options(job)),
        *cluster.setup,
        *starmap(export_line, (cluster.environment | import_environment()).items()),
        # By default srun reuses the --export value of sbatch, which may hide variables from ranks.
        "export SRUN_EXPORT_ENV=ALL",
        f"container_command=({shlex.join(_container_command(cluster.container))})",
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
        "job-name": shlex.quote(job.name),
        "chdir": shlex.quote(str(job.folder)),
        # sbatch replaces %j and similar patterns in this path.
        "output": shlex.quote(f"{job.run_dir}/".replace("%", "%%") + "job_%j.log"),
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
        "dependency": None if job.dependency is None else shlex.quote(job.dependency),
        "export": cluster.export,
    }
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    flags = {"requeue": True, "exclusive": cluster.exclusive, "no-kill": job.spares > 0}
    options += [name for name, is_set in flags.items() if is_set]
    _check_unmanaged(cluster.sbatch_options, {*given, *flags, *_INCOMPATIBLE})
    for option in cluster.sbatch_options:
        name, equals, value = option.removeprefix("--").partition("=")
        options.append(f"{name}{equals}{shlex.quote(value) if value else ''}")
    for option in options:
        if _CONTROL.search(option):
            raise UserError(
                f"sbatch cannot read the option --{shorten(option)}; use names without control "
                "characters"
            )
    return options


def _check_unmanaged(options: Iterable[str], managed: set[str]) -> None:
    """Refuse options that the job file already sets, also if their names are abbreviated."""
    for option in options:
        name = option[2:].partition("=")[0]
        # Long options may be abbreviated, such as --part for --partition.
        if any(each.startswith(name) for each in managed):
            raise UserError(
                f"sbatch_options has {shorten(option)}, but launch sets this option itself from "
                "the other keys of the cluster file and its own options; leave it out"
            )


def _container_command(container: Container | None) -> list[str]:
    """Return the prefix of a command that runs inside an Apptainer container; [] without one."""
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


def read_job_number(run_dir: Path) -> str | None:
    """Return the Slurm ID of the job last submitted for a ``run_dir``, or None."""
    path = run_dir / JOB_NUMBER
    return read_text(path, max_bytes=_MAX_NUMBER_BYTES).strip() if path.exists() else None
