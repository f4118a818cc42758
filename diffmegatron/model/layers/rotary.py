"""Rotary embedding: the angles of positions, and the rotation of queries and keys by these angles.

For the backward pass, the rotation saves only the angles, which all layers share. In shapes s is
the number of positions on this context-parallel rank, b the number of sequences, and d the width of
a query or key.
"""

import math
from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.zigzag import shard_sequence
from diffmegatron.config.model_config import RopeScaling


def rotary_angles(
    length: int,
    width: int,
    theta: float,
    scaling: RopeScaling | None,
    group: distributed.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Return the angles of this rank's positions in a sequence, float32 [s, 1, 1, d] in radians.

    The angle of channels i and i + d / 2 is ``position * theta ** (-2 * i / d)`` without
    ``scaling``. ``width`` is d. ``length`` is the number of positions of the unsharded sequence.
    ``group`` has the context-parallel ranks.
    """
    channels = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (theta ** (channels / width))
    if scaling is not None:
        frequencies = scaled_frequencies(frequencies, scaling, theta)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)
    whole = torch.cat((angles, angles), dim=-1)[:, None, None]
    return shard_sequence(whole, 0, group.rank(), group.size())


def scaled_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Scale the rotary frequencies of base ``theta``, [d / 2] in radians per position.

    The kind ``linear`` divides all frequencies by the factor. The kinds ``llama3`` and ``yarn``
    keep high frequencies, divide low frequencies, and interpolate in between. The float32 results
    equal the results of ``transformers`` (modeling_rope_utils.py) bit by bit.
    """
    if scaling.kind == "yarn":
        return _yarn_frequencies(frequencies, scaling, theta)
    lowered = frequencies / scaling.factor
    if scaling.kind == "linear":
        return lowered
    low, high, length = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_length
    wavelength = 2 * math.pi / frequencies
    share = (length / wavelength - low) / (high - low)
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    long = torch.where(wavelength > length / low, lowered, between)
    return torch.where(wavelength < length / high, frequencies, long)


def _yarn_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Interpolate by channels between the frequencies and their quotients by the factor.

    The share of the quotients rises linearly from the channel that turns ``beta_fast`` times in the
    original length to the channel that turns ``beta_slow`` times (section 3.2 of arXiv 2309.00071).
    """
    width = 2 * frequencies.numel()

    def channel(turns: float) -> float:
        length = scaling.original_length / (turns * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    channels = torch.arange(width // 2, dtype=torch.float32, device=frequencies.device)
    kept = 1 - ((channels - first) / (last - first)).clamp(0, 1)
    wavelengths = theta ** (torch.arange(0, width, 2, device=frequencies.device).float() / width)
    lowered = 1.0 / (scaling.factor * wavelengths)
    return lowered * (1 - kept) + frequencies * kept


def rotate(query: Tensor, key: Tensor, angles: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [s, b, ..., d] by angles [s, 1, 1, d], and scale them.

    Channels i and i + d / 2 are rotated as a pair. Queries and keys must have the same dtype. Sines
    and cosines are multiplied by ``scale`` and then rounded to this dtype.
    """
    turned: tuple[Tensor, Tensor] = _Rotation.apply(angles, 1, scale, query, key)
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, angles: Tensor, direction: int, scale: float, *heads: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(angles)
        ctx.direction, ctx.scale = direction, scale
        dtype = heads[0].dtype
        cos, sin = angles.cos(), angles[..., : angles.shape[-1] // 2].sin()
        if scale != 1:
            cos, sin = cos * scale, sin * scale
        cos, sin = cos.to(dtype), sin.to(dtype)
        return tuple(_turned(each, cos, sin, direction) for each in heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        return None, None, None, *_Rotation.apply(angles, -ctx.direction, ctx.scale, *grads)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    # `cos` is [s, 1, 1, d], and `sin` is [s, 1, 1, d / 2]. Direction -1 rotates back.
    ones = [1] * (heads.dim() - 2)
    cos, sin = (x.view(x.shape[0], *ones, x.shape[-1]) for x in (cos, sin))
    turned = heads * cos
    first, second = heads.split(sin.shape[-1], -1)
    first_turned, second_turned = turned.split(sin.shape[-1], -1)
    first_turned.addcmul_(second, sin, value=-direction)
    second_turned.addcmul_(first, sin, value=direction)
    return turned
