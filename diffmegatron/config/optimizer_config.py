"""The ``optimizer`` section of a recipe: trained tensors, AdamW, Muon and learning rates."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from diffmegatron.section import MAX_COUNT, Section

_MAX_PATTERNS = 64

NamePattern = Annotated[str, Field(min_length=1, max_length=200)]
"""Tensor name that may have shell wildcards: ``decoder.layers.*.mlp.linear_fc2.weight``."""
_Steps = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Share = Annotated[float, Field(ge=0, lt=1)]


class Schedule(Section):
    """Learning rate over a run: linear warm-up, then constant or a decay to ``final_lr``.

    ``linear`` and ``cosine`` decay from the end of the warm-up to the last step. ``constant`` never
    decays. ``wsd`` (arXiv 2404.06395) decays linearly over the last ``decay_steps`` steps.
    """

    kind: Literal["linear", "cosine", "constant", "wsd"] = Field(
        default="linear", description="course of the learning rate after the warm-up"
    )
    warmup_steps: _Steps | None = Field(
        default=None, description="steps of the linear warm-up from 0; null: warmup_ratio or none"
    )
    warmup_ratio: _Share | None = Field(
        default=None, description="share of the run's steps, instead of warmup_steps"
    )
    decay_steps: Annotated[_Steps, Field(ge=1)] | None = Field(
        default=None, description="last steps of the run, in which wsd decays"
    )
    decay_ratio: Annotated[_Share, Field(gt=0)] | None = Field(
        default=None, description="share of the run's steps, instead of decay_steps"
    )
    final_lr: float = Field(
        default=0.0,
        ge=0,
        description="learning rate of the last step; for Muon in proportion",
    )

    @model_validator(mode="after")
    def _one_length_each(self) -> Self:
        for name in ("warmup", "decay"):
            steps, ratio = getattr(self, f"{name}_steps"), getattr(self, f"{name}_ratio")
            if steps is not None and ratio is not None:
                raise ValueError(
                    f"optimizer.schedule.{name}_steps is {steps} and "
                    f"optimizer.schedule.{name}_ratio is {ratio:g}; give one of them (null unsets "
                    "a key)"
                )
        decays = self.decay_steps is not None or self.decay_ratio is not None
        if decays != (self.kind == "wsd"):
            name = "decay_steps" if self.decay_steps is not None else "decay_ratio"
            raise ValueError(
                f"optimizer.schedule.{name} belongs to kind 'wsd' and optimizer.schedule.kind is "
                f"{self.kind!r}; leave it out, or set it to null if another file gives it"
                if decays
                else "optimizer.schedule.kind 'wsd' needs the length of its decay; give "
                "optimizer.schedule.decay_ratio (0.1, say) or decay_steps"
            )
        return self

    def warmup(self, total_steps: int) -> int:
        """Return the number of warm-up steps of a run."""
        return _steps(self.warmup_steps, self.warmup_ratio, total_steps)

    def decay(self, total_steps: int) -> int:
        """Return the number of decay steps at the end of a ``wsd`` run, at least 1."""
        return max(1, _steps(self.decay_steps, self.decay_ratio, total_steps))


def _steps(steps: int | None, ratio: float | None, total_steps: int) -> int:
    return steps or 0 if ratio is None else round(ratio * total_steps)


class MuonConfig(Section):
    """Muon (Jordan et al., 2024) for the matrices of the layers, with ``kind: muon``.

    An update is the momentum of a matrix with all singular values replaced by about 1. ``rms``
    multiplies it by 0.2 sqrt(max(rows, columns)), so that its root mean square is that of AdamW's
    updates, and AdamW's ``lr`` and ``weight_decay`` fit (Moonlight, arXiv 2502.16982).
    ``spectral`` multiplies it by sqrt(max(1, rows / columns)).
    """

    lr: float | None = Field(
        default=None, gt=0, description="largest learning rate of Muon; null: optimizer.lr"
    )
    momentum: float = Field(
        default=0.95, ge=0, lt=1, description="decay rate of the averaged gradients"
    )
    nesterov: bool = Field(default=True, description="average the gradient once more")
    steps: Annotated[int, Field(ge=1, le=99)] = Field(
        default=5, description="Newton-Schulz iterations"
    )
    scale: Literal["rms", "spectral"] = Field(
        default="rms", description="factor of the update: rms like AdamW's, or by the shape"
    )
    per_head: bool = Field(
        default=False, description="each head of linear_qkv is a matrix of its own"
    )


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019) under DeepSpeed ZeRO, and the tensors that it trains.

    With ``kind: muon``, Muon trains the matrices of the layers, and AdamW all other tensors.

    ``trainable`` has patterns of tensor names. Other tensors are frozen, except LoRA's
    matrices. The suffix ``:q``, ``:k``, ``:v`` or ``:[kv]`` selects rows of ``linear_qkv``, such as
    ``*.linear_qkv.weight:k``; ``:g`` selects those of an elementwise ``output_gate``.
    ``lr_multipliers`` maps patterns without suffix to factors of the learning rate.
    """

    kind: Literal["adamw", "muon"] = Field(
        default="adamw", description="muon: Muon for the matrices of layers, AdamW for the rest"
    )
    lr: float = Field(gt=0, description="largest learning rate")
    lr_multipliers: dict[NamePattern, Annotated[float, Field(gt=0)]] = Field(
        default={}, max_length=_MAX_PATTERNS, description="factors of the learning rate by pattern"
    )
    trainable: Annotated[tuple[NamePattern, ...], Field(max_length=_MAX_PATTERNS)] | None = Field(
        default=None, description="patterns; null: everything, or with LoRA its matrices only"
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="decay rates of Adam's two moments"
    )
    eps: float = Field(default=1e-8, gt=0, description="number in the denominator of the update")
    weight_decay: float = Field(
        default=0.1, ge=0, description="decoupled decay, multiplied by the learning rate"
    )
    decay_embeddings: bool = Field(default=True, description="decay the embedding and output too")
    decay_lambda: bool = Field(
        default=False,
        description="decay parameters of lambda too; in fp32, gradients are then summed over ranks "
        "only at the end of the backward pass",
    )
    clip_grad_norm: float = Field(
        default=1.0, gt=0, description="largest norm of all gradients; longer ones are scaled"
    )
    muon: MuonConfig = MuonConfig()
    schedule: Schedule = Schedule()

    @model_validator(mode="after")
    def _muon_is_used(self) -> Self:
        if self.kind == "adamw" and self.muon != MuonConfig():
            raise ValueError(
                "optimizer.muon has settings and optimizer.kind is 'adamw', which does not read "
                "them; give kind 'muon', or leave optimizer.muon out"
            )
        return self

    @property
    def muon_lr_factor(self) -> float:
        """Muon's learning rate divided by ``lr``."""
        return 1.0 if self.muon.lr is None else self.muon.lr / self.lr

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
                f"{self.lr:g}; the learning rate decays to it, so give at most optimizer.lr"
            )
        return self
