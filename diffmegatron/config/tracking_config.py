"""Profiling and tracking of a run: ``training.profile`` and ``training.wandb``."""

from typing import Annotated

from pydantic import Field

from diffmegatron.section import Count, Section, SizeOrZero

_Name = Annotated[str, Field(min_length=1, max_length=128)]


class ProfileConfig(Section):
    """Profiler trace of some steps, in ``run_dir/profile/``; on a GPU also memory allocations."""

    start: Count = Field(description="first traced step, from 1")
    steps: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="number of steps; each takes tens of MB with a large model"
    )
    ranks: tuple[SizeOrZero, ...] = Field(
        default=(0,), min_length=1, max_length=4096, description="ranks that write a trace"
    )


class WandbConfig(Section):
    """Logging to Weights & Biases in addition to TensorBoard; needs the package ``wandb``."""

    project: _Name
    entity: _Name | None = None
    name: _Name | None = Field(default=None, description="null: the name of run_dir")
