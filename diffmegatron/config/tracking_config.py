"""What a run shows of itself beyond its metrics: ``training.profile`` and ``training.wandb``."""

from typing import Annotated

from pydantic import Field

from diffmegatron.section import Count, Section, SizeOrNone

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class ProfileConfig(Section):
    """A trace of some steps, and on a GPU what was allocated in them, into ``run_dir/profile/``."""

    start: Count = Field(description="first step that is traced, from 1")
    steps: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="how many; a step of a large model takes tens of MB"
    )
    ranks: tuple[SizeOrNone, ...] = Field(
        default=(0,), min_length=1, max_length=4096, description="that write a trace"
    )


class WandbConfig(Section):
    """Weights & Biases beside TensorBoard; the package ``wandb`` has to be installed."""

    project: _Name
    entity: _Name | None = None
    name: _Name | None = Field(default=None, description="null: the name of run_dir")
