"""Rotary embedding of queries and keys, as one operation of autograd.

Megatron-core's own writes the turned halves, both products and two concatenations, as much again
in the backward pass, and keeps sines and cosines in every layer. Here one product is written and
added to once, the backward pass turns the other way, and all that is kept are the angles, which the
layers share.
"""

from typing import Any

import torch
from torch import Tensor


def rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Turn channel i and i + d / 2 of each head by its position's angle, the same for both.

    Args:
        heads: [s, b, heads, d], floating point.
        angles: [s, 1, 1, d], the second half as the first.

    Returns:
        [s, b, heads, d] in heads' dtype, with sines and cosines of that dtype.
    """
    turned: Tensor = _Rotation.apply(heads, angles)
    return turned


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, angles: Tensor) -> Tensor:
        ctx.save_for_backward(angles)
        half = heads.shape[-1] // 2
        turned = heads * angles.cos().to(heads.dtype)
        sin = angles[..., :half].sin().to(heads.dtype)
        first, second = heads.split(half, -1)
        first_turned, second_turned = turned.split(half, -1)
        first_turned.addcmul_(second, sin, value=-1)
        second_turned.addcmul_(first, sin)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (angles,) = ctx.saved_tensors
        return _Rotation.apply(grad, -angles), None
