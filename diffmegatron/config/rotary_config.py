"""Rotary embeddings scaled for longer sequences."""

from typing import Literal, Self

from pydantic import Field, model_validator

from diffmegatron.section import Section, Size


class RopeScaling(Section):
    """Scaling of the rotary frequencies of ``model.rope_theta``.

    ``linear`` divides all frequencies by ``factor`` (position interpolation, arXiv 2306.15595).
    ``llama3`` (Llama 3.1) divides those with a wavelength above ``original_length /
    low_freq_factor`` tokens, keeps those below ``original_length / high_freq_factor``, and
    interpolates between.
    """

    kind: Literal["linear", "llama3"]
    factor: float = Field(ge=1)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    original_length: Size = Field(default=8192, description="tokens, before scaling")

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"model.rope_scaling.low_freq_factor {self.low_freq_factor:g} is not below "
                f"model.rope_scaling.high_freq_factor {self.high_freq_factor:g}; give a smaller "
                "low_freq_factor"
            )
        return self
