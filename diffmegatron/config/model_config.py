"""The ``model`` section of a recipe: network, rotary scaling, LoRA and initial weights."""

import math
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.attention.kinds.selected_heads import MAY_BE_MISSING
from diffmegatron.section import Section, Size, SizeOrZero


class Initialization(Section):
    """Initial weights of projections, normally distributed with standard deviation ``std``.

    ``scaled`` divides ``std`` by sqrt(2 * num_layers) for ``linear_proj`` and ``linear_fc2``, as
    GPT-2 and Megatron-core do. ``normal`` does not. ``mup`` is ``scaled`` at the width
    ``base_hidden_size``. Wider networks have smaller initial values and learning rates
    (:mod:`diffmegatron.config.width_scaling`).

    By default, untied embeddings start with standard deviation 1 (docs/recipes.md has the reason).
    """

    scheme: Literal["scaled", "normal", "mup"] = Field(
        default="scaled",
        description="scaled: divide std by sqrt(2 num_layers) in output matrices; mup: and scale "
        "initial values and learning rates with the width",
    )
    std: float = Field(default=0.02, gt=0, description="standard deviation of the matrices")
    embedding_std: float | None = Field(
        default=None,
        gt=0,
        description="standard deviation of the embedding; null: 1, or std with tied_embeddings",
    )
    base_hidden_size: Size | None = Field(
        default=None, description="hidden_size at which the settings were chosen; mup"
    )
    base_head_dim: Size | None = Field(
        default=None, description="head_dim at which they were chosen; null: the model's; mup"
    )

    @model_validator(mode="after")
    def _base_belongs_to_mup(self) -> Self:
        if self.scheme == "mup":
            if self.base_hidden_size is None:
                raise ValueError(
                    "model.initialization.scheme is 'mup', which needs base_hidden_size, the width "
                    "at which learning rate and std were chosen"
                )
        elif self.base_hidden_size is not None or self.base_head_dim is not None:
            raise ValueError(
                "model.initialization has a base width and scheme "
                f"{self.scheme!r}, which does not read it; give 'mup', or leave base_hidden_size "
                "and base_head_dim out"
            )
        return self


class RopeScaling(Section):
    """Scaling of the rotary frequencies of ``model.rope_theta``.

    ``linear`` divides all frequencies by ``factor`` (position interpolation, arXiv 2306.15595).
    ``llama3`` (Llama 3.1) divides only frequencies with a wavelength above ``original_length /
    low_freq_factor`` tokens. It keeps frequencies with a wavelength below ``original_length /
    high_freq_factor``, and interpolates between these wavelengths.

    ``yarn`` (arXiv 2309.00071) keeps frequencies that turn more than ``beta_fast`` times in
    ``original_length`` tokens, divides those that turn less than ``beta_slow`` times, and
    interpolates between these channels. It also multiplies rotated queries and keys by
    :attr:`rotation_scale`. Its keys are those of transformers (modeling_rope_utils.py).
    """

    kind: Literal["linear", "llama3", "yarn"] = Field(
        description="linear: divide all frequencies; llama3 and yarn: divide the low ones only"
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
        default=8192, description="tokens that the model was trained with before; llama3, yarn"
    )
    beta_fast: float = Field(
        default=32.0, gt=0, description="turns within original_length of kept frequencies; yarn"
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="turns within original_length of divided frequencies; yarn"
    )
    attention_factor: float | None = Field(
        default=None, gt=0, description="factor of queries and keys; null: from mscale; yarn"
    )
    mscale: float | None = Field(
        default=None, ge=0, description="weight of ln(factor) in the attention factor; yarn"
    )
    mscale_all_dim: float | None = Field(
        default=None, ge=0, description="the same weight in the divisor of that factor; yarn"
    )
    truncate: bool = Field(
        default=True, description="round the ends of the interpolation to whole channels; yarn"
    )

    @property
    def rotation_scale(self) -> float:
        """Number by which rotated queries and keys are multiplied; 1 for other kinds than yarn.

        Without ``attention_factor`` and both weights it is 0.1 ln(factor) + 1 (equation 22 of arXiv
        2309.00071).
        """
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> Self:
        for name, kinds in SCALING_KINDS.items():
            default = type(self).model_fields[name].default
            if self.kind not in kinds and getattr(self, name) != default:
                raise ValueError(
                    f"model.rope_scaling.{name} belongs to kind {' or '.join(map(repr, kinds))} "
                    f"and model.rope_scaling.kind is {self.kind!r}; give the kind that has "
                    f"it, or the default {default!r}"
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError(
                f"model.rope_scaling.mscale is {self.mscale} and model.rope_scaling.mscale_all_dim "
                f"is {self.mscale_all_dim}; one has no effect without the other, so give both or "
                "neither"
            )
        if self.attention_factor is not None and self.mscale is not None:
            raise ValueError(
                f"model.rope_scaling.attention_factor {self.attention_factor:g} replaces mscale "
                "and mscale_all_dim; leave these out"
            )
        if self.kind == "yarn" and "original_length" not in self.model_fields_set:
            raise ValueError(
                "model.rope_scaling.kind 'yarn' needs original_length, the tokens that the model "
                "was trained with before"
            )
        return self

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"model.rope_scaling.{low} {getattr(self, low):g} is not below "
                    f"model.rope_scaling.{high} {getattr(self, high):g}; give a smaller {low}"
                )
        return self


# Key of `RopeScaling` -> the kinds in which it has an effect, for keys that not all kinds have.
SCALING_KINDS: dict[str, tuple[str, ...]] = {
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "original_length": ("llama3", "yarn"),
    "beta_fast": ("yarn",),
    "beta_slow": ("yarn",),
    "attention_factor": ("yarn",),
    "mscale": ("yarn",),
    "mscale_all_dim": ("yarn",),
    "truncate": ("yarn",),
}
LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class LoraConfig(Section):
    """Low-rank adapters of the projections named by ``targets``.

    W x becomes W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]. B starts at zero. W
    is frozen if no pattern of ``optimizer.trainable`` matches it. Fused projections have one A and
    one B, as in Megatron Bridge's ``LoRA``.
    """

    rank: Annotated[Size, Field(le=4096)] = Field(description="rows of A and columns of B")
    alpha: float = Field(gt=0, description="the update is multiplied by alpha / rank")
    targets: tuple[LoraTarget, ...] = Field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        description="projections of every layer that get an update",
    )

    @field_validator("targets")
    @classmethod
    def _some_and_each_once(cls, targets: tuple[LoraTarget, ...]) -> tuple[LoraTarget, ...]:
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
    layers of each (:mod:`diffmegatron.attention.kinds.layer_kinds`). ``baseline`` replaces
    ``attention`` by the Transformer's attention of the same width.
    """

    num_layers: Size = Field(description="number of layers")
    hidden_size: Annotated[Size, Field(ge=2)] = Field(description="channels of the hidden states")
    baseline: bool = Field(
        default=False, exclude=True, description="replace attention by the Transformer's"
    )
    attention: LayerKinds
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
    _replaced: LayerKinds | None = PrivateAttr(default=None)

    @field_validator("attention", mode="before")
    @classmethod
    def _of_its_kinds(cls, section: object, info: ValidationInfo) -> LayerKinds:
        context = info.context
        if context is not None and info.data.get("baseline"):
            # The baseline replaces this attention by softmax attention, which needs no files.
            context = {**context, MAY_BE_MISSING: True}
        return LayerKinds.read(section, context)

    @field_validator("attention", mode="after")
    @classmethod
    def _sized(cls, attention: LayerKinds, others: ValidationInfo) -> LayerKinds:
        """Fill in sizes that follow from other keys, so that the saved recipe contains them."""
        if not {"num_layers", "hidden_size", "baseline"} <= others.data.keys():
            return attention
        return attention.sized(others.data["hidden_size"], others.data["num_layers"])

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

    @model_validator(mode="after")
    def _theta_has_a_logarithm(self) -> Self:
        is_yarn = self.rope_scaling is not None and self.rope_scaling.kind == "yarn"
        if is_yarn and self.rope_theta <= 1:
            raise ValueError(
                f"model.rope_theta is {self.rope_theta:g}, and kind 'yarn' of model.rope_scaling "
                "divides by its logarithm; give a number above 1"
            )
        return self

    @property
    def replaced(self) -> LayerKinds | None:
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
