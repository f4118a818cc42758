"""Angles of rotary embeddings, and their frequencies with the recipe's scaling."""

import math

import torch
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.zigzag import shard_sequence
from diffmegatron.config.rope_config import RopeScaling


def rotary_angles(
    length: int,
    width: int,
    theta: float,
    scaling: RopeScaling | None,
    group: distributed.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Return the rotary angles of the positions on this context-parallel rank.

    Args:
        length: number of positions of the whole sequence.
        width: number of channels of a head, d.
        theta: base of the frequencies.
        scaling: scaling of the frequencies; None for none.
        group: context-parallel ranks.
        device: device of the result.

    Returns:
        Float32 [s, 1, 1, d] in radians; both halves of d are equal.
    """
    channels = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (theta ** (channels / width))
    if scaling is not None:
        frequencies = scaled_frequencies(frequencies, scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    whole = torch.cat((angles, angles), dim=-1)[:, None, None]
    return shard_sequence(whole, 0, group.rank(), group.size())


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return scaled frequencies in radians per position.

    The order of operations is that of ``transformers`` (modeling_rope_utils.py), so that float32
    gives the same bits. Megatron-core's own ``rope_scaling`` fixes all values but the factor.

    Args:
        frequencies: unscaled frequencies, [d / 2] float32.
        scaling: section ``model.rope_scaling``.
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
