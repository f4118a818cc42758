"""Rotary embedding of queries and keys, as one operation of autograd.

Megatron-core's own writes the turned halves, both products and two concatenations, as much again
in the backward pass, and keeps sines and cosines in every layer. Here one product is written and
added to once, the backward pass turns the other way, and all that is kept are the angles, which the
layers share.
"""

from typing import Any

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Turn channel i and i + d / 2 of each head by its position's angle, the same for both.

    Args:
        query, key: [s, b, ..., d], floating point, of one dtype.
        angles: [s, 1, 1, d], the second half as the first.

    Returns:
        The same shapes and dtype, contiguous; with sines and cosines of that dtype.
    """
    turned: tuple[Tensor, Tensor] = _Rotation.apply(angles, 1, query, key)
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, angles: Tensor, direction: int, *heads: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(angles)
        ctx.direction = direction
        dtype = heads[0].dtype
        cos, sin = angles.cos().to(dtype), angles[..., : angles.shape[-1] // 2].sin().to(dtype)
        return tuple(_turned(each, cos, sin, direction) for each in heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (angles,) = ctx.saved_tensors
        return None, None, *_Rotation.apply(angles, -ctx.direction, *grads)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Heads [s, b, ..., d], cos [s, 1, 1, d], sin [s, 1, 1, d / 2]; direction is 1, or -1 back."""
    ones = [1] * (heads.dim() - 2)
    cos, sin = (x.view(x.shape[0], *ones, x.shape[-1]) for x in (cos, sin))
    turned = heads * cos
    first, second = heads.split(sin.shape[-1], -1)
    first_turned, second_turned = turned.split(sin.shape[-1], -1)
    first_turned.addcmul_(second, sin, value=-direction)
    second_turned.addcmul_(first, sin, value=direction)
    return turned
