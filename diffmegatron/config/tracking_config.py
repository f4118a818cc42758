"""What a run shows of itself beyond its metrics: ``training.profile``."""

from typing import Annotated

from pydantic import Field

from diffmegatron.section import Count, Section, SizeOrNone


class ProfileConfig(Section):
    """A trace of some steps, and on a GPU what was allocated in them, into ``run_dir/profile/``."""

    start: Count = Field(description="first step that is traced, from 1")
    steps: Annotated[int, Field(ge=1, le=100)] = Field(
        default=3, description="how many; a step of a large model takes tens of MB"
    )
    ranks: tuple[SizeOrNone, ...] = Field(
        default=(0,), min_length=1, max_length=4096, description="that write a trace"
    )
