"""The ``training`` section of a recipe: length, batch, precision and measurements."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from diffmegatron.config.evaluate_config import EvaluateConfig
from diffmegatron.config.tracking_config import ProfileConfig, WandbConfig
from diffmegatron.section import MAX_SIZE, Count, Section, Seed, Size


def _check_backend(name: str) -> str:
    if name != "auto" and name not in DIFFERENTIAL:
        raise PydanticCustomError(
            "backend", "it should be 'auto' or one of {names}", {"names": ", ".join(DIFFERENTIAL)}
        )
    return name


class TrainingConfig(Section):
    """Length, batch, precision and measurements of a run; batch sizes are in sequences."""

    seq_length: Annotated[Size, Field(ge=2)]
    global_batch_size: Size
    micro_batch_size: Size = 1
    steps: Count | None = None
    tokens: Count | None = Field(default=None, description="length of the run, instead of steps")
    precision: Literal["bf16", "fp32"] = "bf16"
    attention_backend: Annotated[str, AfterValidator(_check_backend)] = Field(
        default="auto", description="kernel of differential attention; doctor lists those that run"
    )
    loss_chunk: Size | None = Field(
        default=None, description="tokens whose logits are in memory at once; null: all"
    )
    offload_activations: bool = Field(
        default=False, description="keep saved activations in host memory until the backward pass"
    )
    deterministic: bool = Field(
        default=False, description="use a fixed order of sums, for the same bits on a GPU too"
    )
    seed: Seed = 1234
    log_interval: Count = 10
    eval_interval: Count = 1000
    eval_batches: int = Field(
        default=10, ge=0, le=MAX_SIZE, description="global batches; 0: no evaluation"
    )
    evaluate: tuple[EvaluateConfig, ...] = Field(
        default=(), max_length=16, description="suites that run within training"
    )
    profile: ProfileConfig | None = None
    wandb: WandbConfig | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(
                f"training.steps is {self.steps} and training.tokens is {self.tokens}; "
                "give exactly one of them (null unsets a key)"
            )
        return self

    @model_validator(mode="after")
    def _profile_starts_within_run(self) -> Self:
        if self.profile is not None and self.profile.start > self.total_steps:
            raise ValueError(
                f"training.profile.start {self.profile.start} is past the run's "
                f"{self.total_steps} steps; give a step from 1 to {self.total_steps}"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens of a global batch."""
        return self.global_batch_size * self.seq_length

    @property
    def total_steps(self) -> int:
        """Number of optimizer steps of the run; ``tokens`` is rounded up to whole batches."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // self.tokens_per_step)
