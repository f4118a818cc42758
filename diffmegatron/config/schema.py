"""The typed recipe: every key a run can have, with its checks.

What can be known from the recipe alone is checked here, before any process group starts; what
needs the number of ranks is checked by :func:`Recipe.data_parallel`.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from diffmegatron.attention.variants import Variant, read_variant
from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.divisibility import check_layout, data_parallel_size
from diffmegatron.config.evaluate_config import EvaluateConfig
from diffmegatron.config.lora_config import LoraConfig
from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.config.parallel_config import ParallelConfig, RecomputeConfig
from diffmegatron.config.recovery_config import CheckpointConfig, GuardConfig, WatchdogConfig
from diffmegatron.config.rope_config import RopeScaling
from diffmegatron.config.tracking_config import ProfileConfig, WandbConfig
from diffmegatron.config.trainable_patterns import check_trainable, of_the_pair
from diffmegatron.section import MAX_SIZE, Count, PathText, Section, Seed, Size, SizeOrNone


class Initialization(Section):
    """Initial weights: normal with ``std``.

    ``scaled`` (default) divides the standard deviation of the two projections that write into the
    residual stream by sqrt(2 num_layers), so that its variance does not grow with depth
    (GPT-2; Megatron-core's own default); ``normal`` uses ``std`` everywhere. Norm weights start
    at 1, what a kind of attention has of its own as that kind says.

    The paper names no scheme. Embeddings start at N(0, 1): the headwise norm makes the output of
    every differential head as large as a trained one from the first step, and embeddings of 0.02
    are small beside it (docs/recipes.md shows the loss). Where the output layer is the same matrix
    it would make logits of that size, so tied embeddings start with ``std``.
    """

    scheme: Literal["scaled", "normal"] = "scaled"
    std: float = Field(default=0.02, gt=0)
    embedding_std: float | None = Field(
        default=None, gt=0, description="null: 1, or std where the embedding is also the output"
    )


class ModelConfig(Section):
    """The network. ``attention`` is a section of its kind's own, with the heads of that kind.

    ``baseline`` puts the Transformer of the pair in its place: as wide, with as many keys and
    values, so that nobody halves or doubles heads by hand. The resolved recipe has its numbers.
    """

    num_layers: Size
    hidden_size: Annotated[Size, Field(ge=2)]
    baseline: bool = Field(default=False, exclude=True, description="the Transformer of the pair")
    attention: SerializeAsAny[Variant]
    ffn_hidden_size: Size
    vocab_size: Size = Field(description="padded size of the embedding")
    vocab_padding: SizeOrNone = Field(
        default=0, description="rows at the end that no token has: out of the loss and of an export"
    )
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    norm_eps: float = Field(default=1e-5, gt=0)
    tied_embeddings: bool = False
    lora: LoraConfig | None = None
    initialization: Initialization = Initialization()
    _replaced: Variant | None = PrivateAttr(default=None)

    @field_validator("attention", mode="before")
    @classmethod
    def _of_its_kind(cls, section: object) -> Variant:
        return read_variant(section)

    @field_validator("attention", mode="after")
    @classmethod
    def _sized(cls, attention: Variant, others: ValidationInfo) -> Variant:
        """Fill in what follows from other keys, so that the saved recipe shows every number."""
        if "hidden_size" not in others.data or "baseline" not in others.data:
            return attention
        sized = attention.sized(others.data["hidden_size"])
        if "num_layers" in others.data:
            sized.check_layers(others.data["num_layers"])
        return sized

    @model_validator(mode="after")
    def _of_the_pair(self) -> Self:
        if not self.baseline or self._replaced is not None:
            return self
        pair = self.model_copy(update={"attention": self.attention.baseline()})
        pair._replaced = self.attention
        return pair

    @model_validator(mode="after")
    def _padding_leaves_tokens(self) -> Self:
        if self.vocab_padding >= self.vocab_size:
            raise ValueError(
                f"model.vocab_padding {self.vocab_padding} leaves no token of model.vocab_size "
                f"{self.vocab_size}; it counts the rows at its end that pad it"
            )
        return self

    @property
    def replaced(self) -> Variant | None:
        """The attention in whose place ``baseline`` has put its Transformer's."""
        return self._replaced

    @property
    def tokens(self) -> int:
        """Rows of the embedding that a token may have."""
        return self.vocab_size - self.vocab_padding

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the embedding's initial values."""
        given = self.initialization.embedding_std
        if given is not None:
            return given
        return self.initialization.std if self.tied_embeddings else 1.0


def _check_backend(name: str) -> str:
    if name != "auto" and name not in DIFFERENTIAL:
        raise PydanticCustomError(
            "backend", "it should be 'auto' or one of {names}", {"names": ", ".join(DIFFERENTIAL)}
        )
    return name


class TrainingConfig(Section):
    """Length, batch and precision of a run. Batch sizes count sequences."""

    seq_length: Annotated[Size, Field(ge=2)]
    global_batch_size: Size
    micro_batch_size: Size = 1
    steps: Count | None = None
    tokens: Count | None = Field(default=None, description="instead of steps")
    precision: Literal["bf16", "fp32"] = "bf16"
    attention_backend: Annotated[str, AfterValidator(_check_backend)] = Field(
        default="auto", description="what computes differential attention; doctor says what can run"
    )
    loss_chunk: Size | None = Field(
        default=None, description="tokens whose logits exist at once; null: all"
    )
    offload_activations: bool = Field(
        default=False, description="what the backward pass needs waits in the host's memory"
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
    def _profile_is_of_the_run(self) -> Self:
        if self.profile is not None and self.profile.start > self.total_steps:
            raise ValueError(
                f"training.profile.start {self.profile.start} is past the run's "
                f"{self.total_steps} steps; give one of them"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.global_batch_size * self.seq_length

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run; ``tokens`` rounds up to whole batches."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None
        return -(-self.tokens // self.tokens_per_step)


class Recipe(Section):
    """One run: everything ``train`` needs, resolved and frozen."""

    run_dir: PathText
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

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
                "data.reset_position_ids is on and data.reset_attention_mask is off; rotary "
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
