"""The ``training`` section of a recipe: length, batch, precision and measurements."""

import math
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from diffmegatron.attention.kernels.registry import DIFFERENTIAL, SOFTMAX, Operation, find_backend
from diffmegatron.section import MAX_SIZE, Count, Section, Seed, Size, SizeOrZero


def _check_backend(name: str) -> str:
    if name != "auto" and not any(find_backend(op, name) for op in get_args(Operation)):
        names = dict.fromkeys([*DIFFERENTIAL, *SOFTMAX])
        raise PydanticCustomError(
            "backend", "it should be 'auto' or one of {names}", {"names": ", ".join(names)}
        )
    return name


def even_chunk(length: int, most: int) -> int:
    """Return the length of the fewest chunks with at most ``most`` of ``length`` positions."""
    return math.ceil(length / math.ceil(length / most))


class KindKernels(Section):
    """Kernels that ``auto`` chose for the layers of one kind of attention, and the origin."""

    attention: Annotated[str, AfterValidator(_check_backend)] = Field(
        description="backend of the kind's attention"
    )
    subtraction: Literal["auto", "pytorch", "triton"] = Field(
        default="auto", description="backend of DIFF V2's subtraction; auto: that of its attention"
    )
    origin: str = Field(max_length=1024, description="measurement or order behind the choice")


# Kernels of the loss: this package's, and Megatron-core's. "auto" is the first that can run.
LossKernel = Literal["auto", "triton", "megatron"]


class ChosenKernels(Section):
    """Kernels that ``auto`` chose for a run; a resumed run keeps them, for the same bits."""

    device: Literal["cuda", "cpu"] = Field(description="device on which they were chosen")
    kinds: tuple[KindKernels, ...] = Field(
        max_length=64, description="one entry per entry of model.attention"
    )
    loss: LossKernel = Field(
        default="auto", description="kernel of the loss; auto: triton on a GPU that has it"
    )


_Name = Annotated[str, Field(min_length=1, max_length=128)]


class Fp8Config(Section):
    """Matrix products of the layers in FP8, by Transformer Engine; scales as ``recipe`` names them.

    ``tensorwise``: one scale per tensor, from its values. ``delayed``: from earlier steps.
    ``blockwise``: one scale per 128 values. ``mxfp8``: one per 32 values.
    """

    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = Field(
        description="scales: per tensor (tensorwise, delayed), or per 128 or 32 values"
    )
    first_layers_bf16: SizeOrZero = Field(default=0, description="first layers that stay in bf16")
    last_layers_bf16: SizeOrZero = Field(default=0, description="last layers that stay in bf16")


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

    project: _Name = Field(description="project at Weights & Biases")
    entity: _Name | None = Field(default=None, description="user or team; null: the login's")
    name: _Name | None = Field(default=None, description="null: the name of run_dir")


class EvaluateConfig(Section):
    """Evaluation of a run with the benchmark named ``suite``, every ``every`` steps.

    Other keys are settings of the suite, which are checked when training starts.
    """

    model_config = ConfigDict(extra="allow")

    suite: str = Field(description="name of the suite, as for evaluate --suite")
    every: Count = Field(description="steps between two evaluations")

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the suite: all keys except ``suite`` and ``every``."""
        return dict(self.model_extra or {})


class TrainingConfig(Section):
    """Length, batch, precision and measurements of a run; batch sizes are in sequences."""

    seq_length: Annotated[Size, Field(ge=2)] = Field(description="tokens of a sequence")
    global_batch_size: Size = Field(description="sequences of a step over all ranks")
    micro_batch_size: Size = Field(
        default=1, description="sequences that a data-parallel rank computes at once"
    )
    steps: Count | None = Field(default=None, description="length of the run in steps")
    tokens: Count | None = Field(
        default=None, description="length of the run in tokens, instead of steps"
    )
    precision: Literal["bf16", "fp32"] = Field(
        default="bf16", description="dtype of weights in the network; master weights are float32"
    )
    fp8: Fp8Config | None = Field(
        default=None, description="matrix products of the layers in FP8; null: in the precision"
    )
    attention_backend: Annotated[str, AfterValidator(_check_backend)] = Field(
        default="auto",
        description="kernel of attention; doctor lists those that run",
    )
    chosen_kernels: ChosenKernels | None = Field(
        default=None, description="what auto chose; a run writes it into its recipe"
    )
    loss_chunk: Size | None = Field(
        default=None,
        description="positions whose logits are in memory at once, in every sequence; null: all",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="coefficient of the squared log-sum-exp of the logits, a second term of the "
        "loss (PaLM: 1e-4); 0: none",
    )
    offload_activations: bool = Field(
        default=False, description="keep saved activations in host memory until the backward pass"
    )
    deterministic: bool = Field(
        default=False, description="use a fixed order of sums, for the same bits on a GPU too"
    )
    seed: Seed = Field(default=1234, description="seed of initial weights and of the data order")
    log_interval: Count = Field(default=10, description="steps between two records of metrics")
    eval_interval: Count = Field(default=1000, description="steps between held-out losses")
    eval_batches: int = Field(
        default=10, ge=0, le=MAX_SIZE, description="global batches; 0: no evaluation"
    )
    evaluate: tuple[EvaluateConfig, ...] = Field(
        default=(), max_length=16, description="suites that run within training"
    )
    profile: ProfileConfig | None = Field(
        default=None, description="trace of some steps; null: none"
    )
    wandb: WandbConfig | None = Field(
        default=None, description="logging to Weights & Biases; null: none"
    )

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

    @model_validator(mode="after")
    def _sums_in_order(self) -> Self:
        known = (find_backend(op, self.attention_backend) for op in get_args(Operation))
        forms = {each.configuration.one_pass for each in known if each and each.configuration}
        if self.deterministic and True in forms:
            raise ValueError(
                f"training.attention_backend {self.attention_backend!r} sums in an order that "
                "changes, and training.deterministic is true; give 'split' in place of 'one_pass'"
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
