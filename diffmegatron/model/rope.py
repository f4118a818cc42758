"""The frequencies of rotary embeddings, scaled as a recipe says."""

import math

import torch
from torch import Tensor

from diffmegatron.config.rope_config import RopeScaling


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Lowered frequencies, in radians per position.

    In the order of operations of ``transformers`` (modeling_rope_utils.py), so that float32 gives
    the same bits; Megatron-core's own ``rope_scaling`` fixes all but the factor.

    Args:
        frequencies: [d / 2] float32, as theta gives them.
        scaling: the section ``model.rope_scaling``.
    """
    lowered = frequencies / scaling.factor
    if scaling.kind == "linear":
        return lowered
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
    wavelength = 2 * math.pi / frequencies
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    long = torch.where(wavelength > length / low, lowered, between)
    return torch.where(wavelength < length / high, frequencies, long)
