"""The content of a checkpoint's ``state.json``: the progress of a run.

The classes describe what the loader (``data/sampling``) and the guard (``optim/guard.py``) save.
"""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, model_validator

from diffmegatron.checkpoint.checkpoint_manifest import MAX_STEP
from diffmegatron.errors import UserError
from diffmegatron.section import MAX_COUNT

Contents = Literal["run", "weights"]
"""``run``: weights, optimizer state and random states; ``weights``: weights only."""
_Steps = Annotated[int, Field(ge=0, le=MAX_STEP)]
_Samples = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_NotNegative = Annotated[FiniteFloat, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Source(_Strict):
    path: str
    content: str
    weight: _NotNegative


class _Period(_Strict):
    from_sample: _Samples
    sources: Annotated[list[_Source], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_a_mixture(self) -> Self:
        if len({source.content for source in self.sources}) < len(self.sources):
            raise ValueError("two sources have the same content")
        if not sum(source.weight for source in self.sources):
            raise ValueError("all weights of the sources are 0")
        return self


class _Data(_Strict):
    """Position of the loader; ``settings`` is compared with the recipe when a run resumes."""

    consumed_samples: _Samples
    settings: dict[str, JsonValue]
    mixture: Annotated[list[_Period], Field(min_length=1)]
    layouts: list[str] = []  # Older checkpoints lack the key.

    @model_validator(mode="after")
    def _periods_follow_one_another(self) -> Self:
        starts = [period.from_sample for period in self.mixture]
        if starts[0] or not all(one < next_one for one, next_one in pairwise(starts)):
            raise ValueError("the periods of the mixture do not ascend from sample 0")
        if starts[-1] > self.consumed_samples:
            raise ValueError("a period of the mixture begins after consumed_samples")
        return self


class _Guard(_Strict):
    recent: dict[Literal["loss", "gradient norm"], list[_NotNegative]]
    in_a_row: _Steps
    skipped: _Steps
    spikes: _Steps
    rollbacks: _Steps
    without_labels: _Steps = 0  # Older checkpoints lack the key.


class State(_Strict):
    """Content of ``state.json``; ``world_size`` is the number of rank files."""

    step: _Steps
    updates: _Steps
    data: _Data | None
    guard: _Guard | None
    world_size: Annotated[int, Field(ge=1)]
    versions: dict[str, str]
    contents: Contents = "run"

    @model_validator(mode="after")
    def _progress_is_possible(self) -> Self:
        if self.updates > self.step:
            raise ValueError(f"{self.step} steps cannot have {self.updates} updates")
        if self.step and self.contents == "run" and (self.data is None or self.guard is None):
            raise ValueError(f"data or guard is null at step {self.step}")
        return self

    def check_samples(self, global_batch_size: int, name: str) -> None:
        """Check that ``consumed_samples`` fits the step.

        Every step consumes a global batch. A rollback decreases the step, but not the samples.

        Raises:
            UserError: If it does not fit; the message begins with ``name``.
        """
        if self.data is None:
            return
        consumed, least = self.data.consumed_samples, self.step * global_batch_size
        rollbacks = 0 if self.guard is None else self.guard.rollbacks
        if consumed % global_batch_size or consumed < least or (consumed > least and not rollbacks):
            raise UserError(
                f"{name} is damaged and cannot be used: {self.step} steps of {global_batch_size} "
                f"samples and {rollbacks} rollbacks do not fit data.consumed_samples {consumed}"
            )
