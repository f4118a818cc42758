"""What is to be known of a cluster to run there: one YAML file, ``configs/clusters``."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, ValidationError, field_validator

from diffmegatron.config.yaml_documents import MAX_BYTES, parse_yaml
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_text, shown
from diffmegatron.section import PathText, Section, Size, SizeOrNone

# What follows "#SBATCH --key=": a line of its own, without what sbatch splits at.
Word = Annotated[str, StringConstraints(pattern=r"^[^\s\x00-\x1f\"'#]+$")]
Line = Annotated[str, StringConstraints(pattern=r"^[^\r\n\x00]*$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_TIME = re.compile(r"(?:(\d{1,3})-)?(\d{1,3})(?::(\d{1,2}))?(?::(\d{1,2}))?")


class Container(Section):
    """Where the ranks run: an image that has this package, and the folders that it sees."""

    kind: Literal["apptainer", "pyxis"]
    image: PathText = Field(description="a path, or what names an image: docker://..., host#name")
    mounts: tuple[PathText, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether the image is a path on this machine."""
        return "://" not in self.image and "#" not in self.image


class Cluster(Section):
    """The whole of the file."""

    gpus_per_node: SizeOrNone = Field(description="0: ranks on processors, one per task")
    ranks_per_node: Size | None = Field(default=None, description="null: one per GPU")
    gpu: str | None = Field(default=None, description="for estimates, as of plan --hardware")
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    exclude: tuple[Word, ...] = Field(default=(), description="nodes")
    exclusive: bool = False
    memory: Word | None = Field(default=None, description="of sbatch --mem; 0: all")
    cpus_per_rank: Size = 8
    time_limit: Word = Field(description="as of sbatch --time: minutes, H:MM:SS or D-HH:MM:SS")
    export: Literal["ALL", "NONE"] = Field(
        default="ALL", description="what a job sees of the submitting shell"
    )
    setup: tuple[Line, ...] = Field(default=(), description="lines of the shell")
    environment: dict[Name, Line] = Field(default={}, description="of every rank")
    container: Container | None = None

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, text: str) -> str:
        if _TIME.fullmatch(text) is None or seconds_of(text) < 60:
            raise ValueError("give minutes, H:MM:SS or D-HH:MM:SS, a minute at least")
        return text

    @property
    def ranks(self) -> int:
        """On each node."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def seconds(self) -> int:
        """Of the time limit."""
        return seconds_of(self.time_limit)


def seconds_of(time_limit: str) -> int:
    """A time as Slurm writes it: minutes, M:SS, H:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    match = _TIME.fullmatch(time_limit)
    assert match is not None
    days, *parts = (None if part is None else int(part) for part in match.groups())
    given = [part for part in parts if part is not None]
    units = (3600, 60, 1) if days is not None or len(given) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(given, units, strict=False))
    return seconds + 86_400 * (days or 0)


def load_cluster(path: Path) -> Cluster:
    """Read the file of a cluster.

    Raises:
        UserError: it cannot be read, a key is unknown, or a value does not fit.
    """
    name = shown(path)
    values = parse_yaml(read_text(path, max_bytes=MAX_BYTES), name)
    if not isinstance(values, dict):
        raise UserError(f"{name} must be a mapping of keys, not {type(values).__name__}")
    try:
        return Cluster.model_validate(values)
    except ValidationError as error:
        # A mistyped key also leaves one missing; the mistyped one is what the user can see.
        found = error.errors(include_url=False)
        first = min(found, key=lambda each: each["type"] != "extra_forbidden")
        key = clipped(".".join(map(str, first["loc"])))
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(Cluster.model_fields))
            raise UserError(f"{name}: unknown key {key!r}; known keys are {known}") from None
        if first["type"] == "missing":
            raise UserError(f"{name}: key {key!r} is missing; a cluster must give it") from None
        raise UserError(
            f"{name}: {key} is {clipped(repr(first['input']))}: {first['msg']}"
        ) from None
