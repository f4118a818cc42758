"""Description of a Slurm cluster in a YAML file such as ``configs/clusters/example.yaml``."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_text
from diffmegatron.section import PathText, Section, Size, SizeOrZero
from diffmegatron.validation import validated
from diffmegatron.yaml_documents import MAX_YAML_BYTES, parse_yaml

# Names of environment variables whose values must not be printed.
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|JWT|_KEY")
# Long option of sbatch with an optional value.
_OPTION = r"^--[a-z][a-z-]*[a-z](=[^\x00-\x1f\x7f]*)?$"
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3})(?::(\d{1,2}))?(?::(\d{1,2}))?")


# Value in a line "#SBATCH --key=value", in which sbatch would interpret spaces, quotes and "#".
Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\"'#]+$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\r\n\x00]*$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Container(Section):
    """Container image in which the ranks run; it must contain this package."""

    kind: Literal["apptainer", "pyxis"] = Field(
        description="apptainer: the whole package runs in the image; pyxis: only the ranks do, so "
        "the first node also needs the package outside. Neither has been tested"
    )
    image: PathText = Field(description="path, or name such as docker://... or host#name")
    mounts: tuple[PathText, ...] = Field(default=(), description="folders visible inside")

    @property
    def is_file(self) -> bool:
        """True if the image is a local path; False if it is the name of a remote image."""
        return "://" not in self.image and "#" not in self.image


class Cluster(Section):
    """Content of a cluster file; a Slurm option whose value is None is not passed to sbatch."""

    gpus_per_node: SizeOrZero = Field(description="0: the ranks compute on CPUs")
    ranks_per_node: Size | None = Field(
        default=None, description="null: one per GPU; give it on CPUs"
    )
    gpu: str | None = Field(
        default=None, description="GPU name for estimates, as plan --hardware; null: no estimates"
    )
    partition: Word | None = Field(default=None, description="sbatch --partition")
    account: Word | None = Field(default=None, description="sbatch --account")
    qos: Word | None = Field(default=None, description="sbatch --qos")
    constraint: Word | None = Field(default=None, description="sbatch --constraint")
    exclude: tuple[Word, ...] = Field(default=(), description="sbatch --exclude: host names")
    exclusive: bool = Field(default=False, description="sbatch --exclusive")
    memory: Word | None = Field(default=None, description="sbatch --mem; 0: all of a node")
    cpus_per_rank: Size | None = Field(default=None, description="sbatch --cpus-per-task")
    time_limit: Word = Field(description="sbatch --time: minutes, H:MM:SS or D-HH:MM:SS")
    sbatch_options: tuple[Annotated[str, StringConstraints(pattern=_OPTION)], ...] = Field(
        default=(),
        description="other options of sbatch, such as --mail-user=a@b.org; options that launch "
        "sets itself are refused",
    )
    export: Literal["ALL", "NONE"] = Field(
        default="ALL",
        description="variables of the submitting shell that the job inherits; NONE: setup creates "
        "the environment of the job",
    )
    setup: tuple[Line, ...] = Field(
        default=(),
        description="shell lines that the job runs first, such as modules and the virtual "
        "environment",
    )
    environment: dict[Name, Line] = Field(
        default={},
        description="variables of every rank, such as NCCL's; quote numbers and booleans. "
        "--dry-run prints no values of names with TOKEN, SECRET, PASSW, CREDENTIAL, JWT or _KEY",
    )
    container: Container | None = Field(
        default=None, description="image in which the job runs; null: none"
    )

    @field_validator("time_limit")
    @classmethod
    def _check_time_limit(cls, text: str) -> str:
        if _TIME.fullmatch(text) is None or parse_time(text) < 60:
            raise PydanticCustomError(
                "time_limit", "give minutes, H:MM:SS or D-HH:MM:SS, at least one minute"
            )
        return text

    @property
    def ranks(self) -> int:
        """Number of ranks on each node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def seconds(self) -> int:
        """Time limit of a job in seconds."""
        return parse_time(self.time_limit)


def export_line(name: str, value: str) -> str:
    """Return the shell line that sets an environment variable."""
    return f"export {name}={shlex.quote(value)}"


def without_secrets(script: str, cluster: Cluster) -> str:
    """Return a script of this cluster in which no secret of its ``environment`` has a value.

    The script ends if the environment of the job lacks one of them.
    """
    for name, value in cluster.environment.items():
        if _SECRET.search(name.upper()):
            missing = "set its value in this line, because --dry-run prints no secrets"
            line = f'export {name}="${{{name}:?{missing}}}"'
            script = script.replace(f"\n{export_line(name, value)}\n", f"\n{line}\n")
    return script


def parse_time(text: str) -> int:
    """Convert a Slurm duration (M, M:SS, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS) to seconds."""
    match = _TIME.fullmatch(text)
    assert match is not None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(given, units, strict=False))
    return seconds + 86_400 * (days or 0)


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file."""
    name = format_path(path)
    values = parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), name)
    if not isinstance(values, dict):
        raise UserError(f"{name} must be a mapping of keys, not {type(values).__name__}")
    return validated(Cluster, values, name)
