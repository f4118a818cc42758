"""The ``model`` section of a recipe: network, rotary scaling, LoRA and initial weights."""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationInfo,
    field_validator,
    model_validator,
)

from diffmegatron.attention.kinds import AttentionKind, read_kind
from diffmegatron.section import Section, Size, SizeOrZero


class Initialization(Section):
    """Initial weights of projections, normally distributed with standard deviation ``std``.

    ``scaled`` divides ``std`` by sqrt(2 * num_layers) for ``linear_proj`` and ``linear_fc2``, as
    GPT-2 and Megatron-core do. ``normal`` does not.

    By default, untied embeddings start with standard deviation 1 (docs/recipes.md has the reason).
    """

    scheme: Literal["scaled", "normal"] = Field(
        default="scaled", description="scaled: divide std by sqrt(2 num_layers) in output matrices"
    )
    std: float = Field(default=0.02, gt=0, description="standard deviation of the matrices")
    embedding_std: float | None = Field(
        default=None,
        gt=0,
        description="standard deviation of the embedding; null: 1, or std with tied_embeddings",
    )


class RopeScaling(Section):
    """Scaling of the rotary frequencies of ``model.rope_theta``.

    ``linear`` divides all frequencies by ``factor`` (position interpolation, arXiv 2306.15595).
    ``llama3`` (Llama 3.1) divides only frequencies with a wavelength above ``original_length /
    low_freq_factor`` tokens. It keeps frequencies with a wavelength below ``original_length /
    high_freq_factor``, and interpolates between these wavelengths.
    """

    kind: Literal["linear", "llama3"] = Field(
        description="linear: divide all frequencies; llama3: divide the low frequencies only"
    )
    factor: float = Field(ge=1, description="divisor of the frequencies")
    low_freq_factor: float = Field(
        default=1.0,
        gt=0,
        description="original_length / longest wavelength that is blended; llama3",
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, description="original_length / longest wavelength that is kept; llama3"
    )
    original_length: Size = Field(
        default=8192, description="tokens that the model was trained with before; llama3"
    )

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor {self.low_freq_factor:g} is not below "
                f"model.rope_scaling.high_freq_factor {self.high_freq_factor:g}; give a smaller "
                "low_freq_factor"
            )
        return self


Target = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class LoraConfig(Section):
    """Low-rank adapters of the projections named by ``targets``.

    W x becomes W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]. B starts at zero. W
    is frozen if no pattern of ``optimizer.trainable`` matches it. Fused projections have one A and
    one B, as in Megatron Bridge's ``LoRA``.
    """

    rank: Annotated[Size, Field(le=4096)] = Field(description="rows of A and columns of B")
    alpha: float = Field(gt=0, description="the update is multiplied by alpha / rank")
    targets: tuple[Target, ...] = Field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        description="projections of every layer that get an update",
    )

    @field_validator("targets")
    @classmethod
    def _some_and_each_once(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if not targets or len(set(targets)) < len(targets):
            raise ValueError(
                f"model.lora.targets is {list(targets)}; give at least one, and each once"
            )
        return targets

    @property
    def scale(self) -> float:
        """Factor of the low-rank update, alpha / rank."""
        return self.alpha / self.rank


class ModelConfig(Section):
    """Sizes, attention and initial weights of the network.

    ``attention`` is the section of one kind of attention, or a list of such sections with the
    layers of each (:mod:`diffmegatron.attention.kinds.pattern`). ``baseline`` replaces
    ``attention`` by the Transformer's attention of the same width.
    """

    num_layers: Size = Field(description="number of layers")
    hidden_size: Annotated[Size, Field(ge=2)] = Field(description="channels of the hidden states")
    baseline: bool = Field(
        default=False, exclude=True, description="replace attention by the Transformer's"
    )
    attention: SerializeAsAny[AttentionKind]
    ffn_hidden_size: Size = Field(description="channels between the two matrices of SwiGLU")
    vocab_size: Size = Field(
        description="rows of the embedding with padding; a multiple of parallel.tensor"
    )
    vocab_padding: SizeOrZero = Field(
        default=0, description="unused rows at the end, excluded from the loss and from exports"
    )
    rope_theta: float = Field(
        default=10_000.0, gt=0, description="base of the rotary embedding's frequencies"
    )
    rope_scaling: RopeScaling | None = Field(
        default=None, description="scaling of the rotary frequencies; null: none"
    )
    norm_eps: float = Field(
        default=1e-5, gt=0, description="number that RMSNorm adds to the mean square"
    )
    tied_embeddings: bool = Field(
        default=False, description="use the embedding's weight in the output layer too"
    )
    lora: LoraConfig | None = Field(
        default=None, description="low-rank updates of frozen matrices; null: none"
    )
    initialization: Initialization = Initialization()
    _replaced: AttentionKind | None = PrivateAttr(default=None)

    @field_validator("attention", mode="before")
    @classmethod
    def _of_its_kind(cls, section: object) -> AttentionKind:
        return read_kind(section)

    @field_validator("attention", mode="after")
    @classmethod
    def _sized(cls, attention: AttentionKind, others: ValidationInfo) -> AttentionKind:
        """Fill in sizes that follow from other keys, so that the saved recipe contains them."""
        if "hidden_size" not in others.data or "baseline" not in others.data:
            return attention
        sized = attention.sized(others.data["hidden_size"])
        if "num_layers" in others.data:
            sized.check_layers(others.data["num_layers"])
        return sized

    @model_validator(mode="after")
    def _with_baseline(self) -> Self:
        if not self.baseline or self._replaced is not None:
            return self
        changed = self.model_copy(update={"attention": self.attention.baseline()})
        changed._replaced = self.attention
        return changed

    @model_validator(mode="after")
    def _padding_leaves_tokens(self) -> Self:
        if self.vocab_padding >= self.vocab_size:
            raise ValueError(
                f"model.vocab_padding {self.vocab_padding} leaves no token of model.vocab_size "
                f"{self.vocab_size}; give the number of padding rows at its end"
            )
        return self

    @property
    def replaced(self) -> AttentionKind | None:
        """Attention that ``baseline`` has replaced; None without ``baseline``."""
        return self._replaced

    @property
    def tokens(self) -> int:
        """Number of embedding rows without padding rows."""
        return self.vocab_size - self.vocab_padding

    @property
    def embedding_std(self) -> float:
        """Standard deviation of the embedding's initial values."""
        given = self.initialization.embedding_std
        if given is not None:
            return given
        return self.initialization.std if self.tied_embeddings else 1.0
