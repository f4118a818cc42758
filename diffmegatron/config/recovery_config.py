"""The sections ``checkpoint``, ``guard`` and ``watchdog`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from diffmegatron.section import MAX_SIZE, Count, PathText, Section, Size


class CheckpointConfig(Section):
    """Settings for saving, keeping and loading checkpoints."""

    interval: Count = Field(default=1000, description="steps; the last step always saves")
    resume: bool = Field(default=True, description="resume from the newest checkpoint in run_dir")
    start_from: PathText | None = Field(
        default=None, description="checkpoint or run_dir whose weights a new run starts with"
    )
    asynchronous: bool = Field(default=True, description="write during the next training steps")
    keep_last: Size | None = Field(default=None, description="number of newest ones; null: all")
    keep_every: Count | None = Field(
        default=None, description="keep_last never removes multiples of this step"
    )
    time_limit_margin: float = Field(
        default=300.0, ge=0, description="seconds before the end of a Slurm job to save and stop"
    )


class GuardConfig(Section):
    """Reaction to a step whose loss or gradient norm is not finite or is a spike.

    A spike exceeds the mean of the last ``window`` applied steps by ``sigma`` standard deviations.
    Spikes are detected once ``window / 2`` steps have been applied. ``record`` reports a spike and
    applies the step; ``skip`` skips the step. A step that is not finite is always skipped.

    ``then`` is the reaction to ``patience`` skipped steps in a row. ``stop`` ends the run.
    ``rollback`` loads the newest intact checkpoint and continues with the data after the skipped
    steps. After ``max_rollbacks`` rollbacks, the run ends instead.
    """

    spikes: Literal["ignore", "record", "skip"] = Field(
        default="record", description="reaction to a spike of the loss or gradient norm"
    )
    sigma: float = Field(
        default=8.0, gt=0, description="standard deviations above the mean that make a spike"
    )
    window: Annotated[Size, Field(ge=8)] = Field(
        default=128, description="applied steps of the mean and standard deviation"
    )
    patience: Size = Field(default=3, description="skipped steps in a row before `then`")
    then: Literal["rollback", "stop"] = Field(
        default="rollback", description="load the newest checkpoint and skip the data, or end"
    )
    max_rollbacks: int = Field(
        default=3, ge=0, le=MAX_SIZE, description="rollbacks after which the run ends instead"
    )


class WatchdogConfig(Section):
    """Time that a rank may spend without progress before it dumps its stacks and ends the job."""

    enabled: bool = Field(default=True, description="end a job whose ranks make no progress")
    startup_seconds: float = Field(
        default=3600.0, gt=0, description="limit for the first step, for a save and for a load"
    )
    step_seconds: float = Field(
        default=600.0, gt=0, description="limit for a step or evaluation batch"
    )
