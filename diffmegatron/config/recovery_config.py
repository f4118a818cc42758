"""The sections of a recipe about survival: ``checkpoint``, ``guard`` and ``watchdog``."""

from typing import Annotated, Literal

from pydantic import Field

from diffmegatron.section import MAX_SIZE, Count, PathText, Section, Size


class CheckpointConfig(Section):
    """When a run saves, what it keeps and how it starts."""

    interval: Count = Field(default=1000, description="steps; the last step always saves")
    resume: bool = Field(default=True, description="go on from the newest checkpoint in run_dir")
    start_from: PathText | None = Field(
        default=None, description="checkpoint or run_dir whose weights a new run starts with"
    )
    asynchronous: bool = Field(default=True, description="write while training goes on")
    keep_last: Size | None = Field(default=None, description="newest ones; null: all")
    keep_every: Count | None = Field(
        default=None, description="steps whose multiples keep_last never removes"
    )
    time_limit_margin: float = Field(
        default=300.0, ge=0, description="seconds before the end of a Slurm job to save and stop at"
    )


class GuardConfig(Section):
    """What to do with a step whose loss or gradient norm is not finite, or is a spike.

    A step that is not finite is never applied. ``spikes`` says what happens to a loss or gradient
    norm more than ``sigma`` standard deviations above the mean of the last ``window`` applied
    steps (once half of them are there): recorded and applied, or skipped as well. After
    ``patience`` skipped steps in a row the run goes back to its newest good checkpoint and on with
    the data after them, at most ``max_rollbacks`` times, or stops.
    """

    spikes: Literal["ignore", "record", "skip"] = "record"
    sigma: float = Field(default=8.0, gt=0)
    window: Annotated[Size, Field(ge=8)] = Field(default=128, description="steps")
    patience: Size = Field(default=3, description="skipped steps in a row")
    then: Literal["rollback", "stop"] = "rollback"
    max_rollbacks: int = Field(default=3, ge=0, le=MAX_SIZE)


class WatchdogConfig(Section):
    """How long a rank may go without progress before it writes its stacks and ends the job."""

    enabled: bool = True
    startup_seconds: float = Field(
        default=3600.0, gt=0, description="until the first step is done; also a save or a load"
    )
    step_seconds: float = Field(default=600.0, gt=0, description="a step or evaluation batch")
