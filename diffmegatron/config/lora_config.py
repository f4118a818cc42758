"""Low-rank adaptation of the projections (Hu et al., 2021, arXiv 2106.09685)."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from diffmegatron.section import Section, Size

Target = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


class LoraConfig(Section):
    """Low-rank adapters of the projections named by ``targets``.

    W x becomes W x + (alpha / rank) B A x, with A [rank, in] and B [out, rank]. B starts at zero,
    and W is frozen. Fused projections have one A and one B, as in Megatron Bridge's ``LoRA``.
    """

    rank: Annotated[Size, Field(le=4096)]
    alpha: float = Field(gt=0)
    targets: tuple[Target, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

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
