"""The typed recipe: every key a run can have, with its checks.

What can be known from the recipe alone is checked here, before any process group starts; what
needs the number of ranks is checked by :func:`Recipe.data_parallel`.
"""

import math
from typing import Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from diffmegatron.config.base import Section
from diffmegatron.config.data import DataConfig
from diffmegatron.config.layout import check_layout, data_parallel_size
from diffmegatron.config.parallel import ParallelConfig, RecomputeConfig
from diffmegatron.config.recovery import CheckpointConfig, GuardConfig, WatchdogConfig


class LambdaInit(Section):
    """The policy of lambda_init (Ye et al., ICLR 2025, section 2.1 and the ablations of 3.8).

    ``exponential`` is 0.8 - 0.6 exp(-0.3 (l - 1)) with l the global layer number from 1;
    ``constant`` is ``value`` in every layer.
    """

    policy: Literal["exponential", "constant"] = "exponential"
    value: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _value_belongs_to_constant(self) -> Self:
        if (self.policy == "constant") != (self.value is not None):
            raise ValueError(
                f"lambda_init.value is {self.value} with policy {self.policy!r}; "
                "give a value with 'constant' and none with 'exponential'"
            )
        return self


class Initialization(Section):
    """Initial weights: normal with ``std``.

    ``scaled`` (default) divides the standard deviation of the two projections that write into the
    residual stream by sqrt(2 num_layers), so that its variance does not grow with depth
    (GPT-2; Megatron-core's own default); ``normal`` uses ``std`` everywhere. Norm weights start
    at 1 and lambda vectors at N(0, ``lambda_std``), the reference code's value.

    The paper names no scheme. Embeddings start at N(0, 1): the headwise norm makes the output of
    every differential head as large as a trained one from the first step, and embeddings of 0.02
    drown in it (docs/recipes.md shows the loss). Where the output layer is the same matrix it
    would make logits of that size, so tied embeddings start with ``std``.
    """

    scheme: Literal["scaled", "normal"] = "scaled"
    std: float = Field(default=0.02, gt=0)
    embedding_std: float | None = Field(
        default=None, gt=0, description="null: 1, or std where the embedding is also the output"
    )
    lambda_std: float = Field(default=0.1, ge=0)


class ModelConfig(Section):
    """The network. Every size is that of the pair: the twins differ in ``attention`` alone.

    ``num_heads`` is h, the number of *differential* heads; the Transformer of the pair has 2h
    heads of the same ``head_dim``, and so has the differential model projections of the same
    width. ``num_kv_heads`` counts alike. Nobody halves anything by hand.
    """

    attention: Literal["differential", "softmax"] = "differential"
    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=2)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(default=0, ge=0, description="0: as many as num_heads")
    head_dim: int = Field(default=0, ge=0, description="0: hidden_size / (2 num_heads)")
    ffn_hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1, description="padded size of the embedding")
    rope_theta: float = Field(default=10_000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    headwise_norm: bool | None = Field(
        default=None, description="null: on for differential, off for softmax"
    )
    lambda_init: LambdaInit = LambdaInit()
    tied_embeddings: bool = False
    initialization: Initialization = Initialization()

    @model_validator(mode="before")
    @classmethod
    def _derive_sizes(cls, values: object) -> object:
        """Fill in what follows from other keys, so that the saved recipe shows every number."""
        if not isinstance(values, dict):
            return values
        derived = dict(values)
        heads, hidden = (_integer(values.get(name)) for name in ("num_heads", "hidden_size"))
        if heads is not None and heads > 0:
            if not _integer(values.get("num_kv_heads", 0)):
                derived["num_kv_heads"] = heads
            if not _integer(values.get("head_dim", 0)) and hidden is not None:
                if hidden % (2 * heads):
                    raise ValueError(
                        f"model.hidden_size {hidden} is no multiple of 2 x num_heads "
                        f"(2 x {heads} heads of the Transformer twin); choose num_heads to divide "
                        f"{hidden / 2:g} or give model.head_dim"
                    )
                derived["head_dim"] = hidden // (2 * heads)
        return derived

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            fits = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"model.num_kv_heads {self.num_kv_heads} does not divide num_heads "
                f"{self.num_heads}; one of {fits} would"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim {self.head_dim} is odd; rotary embeddings turn pairs of channels"
            )
        return self

    @property
    def is_differential(self) -> bool:
        """Whether this is the differential model of the pair."""
        return self.attention == "differential"

    @property
    def has_headwise_norm(self) -> bool:
        """Whether each head's output is normalised on its own."""
        return self.is_differential if self.headwise_norm is None else self.headwise_norm

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the embedding's initial values."""
        given = self.initialization.embedding_std
        if given is not None:
            return given
        return self.initialization.std if self.tied_embeddings else 1.0

    @property
    def num_attention_heads(self) -> int:
        """Heads of width ``head_dim`` in the projections, 2h: Megatron's and Hugging Face's."""
        return 2 * self.num_heads

    @property
    def num_query_groups(self) -> int:
        """Key and value heads of width ``head_dim``, 2 h_kv: Megatron's and Hugging Face's."""
        return 2 * self.num_kv_heads

    @property
    def head_norm_dim(self) -> int:
        """Channels of one head's output: 2d for a differential head, d for the Transformer's."""
        return 2 * self.head_dim if self.is_differential else self.head_dim


class Schedule(Section):
    """Learning rate after ``warmup_steps`` of linear warm-up: down to ``final_lr`` at the end."""

    kind: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    final_lr: float = Field(default=0.0, ge=0)


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019) under DeepSpeed ZeRO."""

    lr: float = Field(gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_embeddings: bool = True
    decay_lambda: bool = False
    clip_grad_norm: float = Field(default=1.0, gt=0)
    schedule: Schedule = Schedule()

    @model_validator(mode="after")
    def _betas_are_decays(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"optimizer.betas is {list(self.betas)}; both must be at least 0 and below 1"
            )
        return self

    @model_validator(mode="after")
    def _final_lr_is_below(self) -> Self:
        if self.schedule.final_lr > self.lr:
            raise ValueError(
                f"optimizer.schedule.final_lr {self.schedule.final_lr:g} is above optimizer.lr "
                f"{self.lr:g}; it is where the decay ends"
            )
        return self


# The names of attention.kernels.select.BACKENDS, which would load torch: a test holds them equal.
AttentionBackend = Literal[
    "auto", "reference", "blocked", "triton", "flash_2call", "flash_4call", "sdpa_4call", "flex"
]


class TrainingConfig(Section):
    """Length, batch and precision of a run. Batch sizes count sequences."""

    seq_length: int = Field(ge=2)
    global_batch_size: int = Field(ge=1)
    micro_batch_size: int = Field(default=1, ge=1)
    steps: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1, description="instead of steps")
    precision: Literal["bf16", "fp32"] = "bf16"
    attention_backend: AttentionBackend = Field(
        default="auto", description="what computes differential attention; doctor says what can run"
    )
    loss_chunk: int | None = Field(
        default=None, ge=1, description="tokens whose logits exist at once; null: all"
    )
    offload_activations: bool = Field(
        default=False, description="what the backward pass needs waits in the host's memory"
    )
    seed: int = Field(default=1234, ge=0)
    log_interval: int = Field(default=10, ge=1)
    eval_interval: int = Field(default=1000, ge=1)
    eval_batches: int = Field(default=10, ge=0, description="global batches; 0: no evaluation")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(
                f"training.steps is {self.steps} and training.tokens is {self.tokens}; "
                "give exactly one of them (null unsets a key)"
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
        return math.ceil(self.tokens / self.tokens_per_step)


class Recipe(Section):
    """One run: everything ``train`` needs, resolved and frozen."""

    run_dir: str
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig = ParallelConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    guard: GuardConfig = GuardConfig()
    watchdog: WatchdogConfig = WatchdogConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        self._check_steps()
        self._check_documents()
        check_layout(self)
        return self

    def _check_steps(self) -> None:
        warmup, steps = self.optimizer.schedule.warmup_steps, self.training.total_steps
        if warmup >= steps:
            raise ValueError(
                f"optimizer.schedule.warmup_steps {warmup} leaves nothing of the run's {steps} "
                f"steps; it must be at most {steps - 1}"
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


_INTEGER = TypeAdapter(int)


def _integer(value: object) -> int | None:
    """``value`` as an integer field will read it, 1e1 and "10" too; None where it will not."""
    try:
        return _INTEGER.validate_python(value)
    except ValidationError:
        return None
