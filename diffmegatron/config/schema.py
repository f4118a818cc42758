"""The typed recipe: all keys of a run and their checks."""

from typing import Self

from pydantic import ValidationInfo, field_validator, model_validator

from diffmegatron.config.divisibility import check_parallel_layout, data_parallel_size
from diffmegatron.config.fp8_products import check_fp8
from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.trainable_patterns import (
    check_muon,
    check_trainable,
    without_replaced_patterns,
)
from diffmegatron.config.width_scaling import check_width_scaling


class Recipe(RecipeSections):
    """The complete, immutable settings of one run."""

    @field_validator("optimizer", mode="after")
    @classmethod
    def _fit_baseline(cls, optimizer: OptimizerConfig, others: ValidationInfo) -> OptimizerConfig:
        model = others.data.get("model")
        return optimizer if model is None else without_replaced_patterns(optimizer, model)

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_steps()
        check_parallel_layout(self)
        check_trainable(self)
        check_muon(self)
        check_fp8(self)
        check_width_scaling(self)
        return self

    def _check_steps(self) -> None:
        schedule, steps = self.optimizer.schedule, self.training.total_steps
        warmup = schedule.warmup(steps)
        if warmup >= steps:
            raise ValueError(
                f"optimizer.schedule.warmup_steps {warmup} leaves no step of the run's {steps}; "
                f"give at most {steps - 1}"
            )
        if schedule.kind == "wsd" and warmup + schedule.decay(steps) > steps:
            raise ValueError(
                f"optimizer.schedule.decay_steps {schedule.decay(steps)} and "
                f"optimizer.schedule.warmup_steps {warmup} are more than the run's {steps} steps; "
                f"give at most {steps - warmup} steps of decay"
            )

    def data_parallel(self, world_size: int) -> int:
        """Return the data-parallel size on ``world_size`` ranks."""
        return data_parallel_size(self, world_size)

    def check_ranks(self, world_size: int) -> None:
        """Raise UserError if the layout and the batch do not fit ``world_size`` ranks."""
        self.data_parallel(world_size)

    def num_microbatches(self, world_size: int) -> int:
        """Return the number of microbatches per step of each data-parallel rank."""
        per_microbatch = self.data_parallel(world_size) * self.training.micro_batch_size
        return self.training.global_batch_size // per_microbatch
