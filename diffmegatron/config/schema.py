"""The typed recipe: every key a run can have, with its checks.

What can be known from the recipe alone is checked here, before any process group starts; what
needs the number of ranks is checked by :func:`Recipe.data_parallel`.
"""

from typing import Self

from pydantic import ValidationInfo, field_validator, model_validator

from diffmegatron.config.divisibility import check_layout, data_parallel_size
from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.trainable_patterns import check_trainable, of_the_pair


class Recipe(RecipeSections):
    """One run: everything ``train`` needs, resolved and frozen."""

    @field_validator("optimizer", mode="after")
    @classmethod
    def _of_the_pair(cls, optimizer: OptimizerConfig, others: ValidationInfo) -> OptimizerConfig:
        return of_the_pair(optimizer, others.data["model"]) if "model" in others.data else optimizer

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_steps()
        self._check_documents()
        check_layout(self)
        check_trainable(self)
        return self

    def _check_steps(self) -> None:
        schedule, steps = self.optimizer.schedule, self.training.total_steps
        warmup = schedule.warmup(steps)
        if warmup >= steps:
            raise ValueError(
                f"optimizer.schedule.warmup_steps {warmup} leaves nothing of the run's {steps} "
                f"steps; it must be at most {steps - 1}"
            )
        if schedule.kind == "wsd" and warmup + schedule.decay(steps) > steps:
            raise ValueError(
                f"optimizer.schedule.decay_steps {schedule.decay(steps)} and "
                f"optimizer.schedule.warmup_steps {warmup} are more than the run's {steps} steps; "
                f"the decay may have {steps - warmup}"
            )

    def _check_documents(self) -> None:
        """Rotary positions are relative: a restart shows only where attention crosses it."""
        if self.data.reset_position_ids and not self.data.reset_attention_mask:
            raise ValueError(
                "data.reset_position_ids is on and data.reset_attention_mask is not; rotary "
                "embeddings see distances only, so turn both on or both off"
            )

    def data_parallel(self, world_size: int) -> int:
        """Data-parallel size on ``world_size`` ranks.

        Raises:
            UserError: the ranks do not fill the layout, or the batch does not divide by it.
        """
        return data_parallel_size(self, world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches that each data-parallel rank runs per step on ``world_size`` ranks."""
        per_microbatch = self.data_parallel(world_size) * self.training.micro_batch_size
        return self.training.global_batch_size // per_microbatch
