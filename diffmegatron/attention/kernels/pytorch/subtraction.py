"""DIFF V2's subtraction in plain PyTorch: `signal - lambda * noise` per token and signal head.

In the shapes b is the batch size, s the number of tokens, and d the width of a head. The heads form
groups of r signal heads and one noise head.
"""

from typing import Any

import torch
from torch import Tensor


def subtract_noise(heads: Tensor, lambda_: Tensor, sigmoid: bool = False) -> Tensor:
    """Return `signal - lambda * noise` (see `api.subtract_noise`), differentiable twice."""
    out: Tensor = _SubtractNoise.apply(heads, lambda_, sigmoid)
    return out


class _SubtractNoise(torch.autograd.Function):
    """Subtraction that saves only its inputs; autograd would also save copies of them in fp32."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, lambda_: Tensor, sigmoid: bool) -> Tensor:
        ctx.save_for_backward(heads, lambda_)
        ctx.sigmoid = sigmoid
        signal, noise, weight = _by_group(heads, lambda_, sigmoid)
        return (signal - weight * noise).flatten(2, 3).to(heads.dtype)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        heads, lambda_ = ctx.saved_tensors
        _, noise, weight = _by_group(heads, lambda_, ctx.sigmoid)
        grad = grad_out.to(noise.dtype).unflatten(2, weight.shape[2:4])
        dnoise = -(weight * grad).sum(3, keepdim=True)
        dheads = torch.cat([x.to(heads.dtype) for x in (grad, dnoise)], 3).flatten(2, 3)
        dlambda = -(grad * noise).sum(-1, keepdim=True)
        if ctx.sigmoid:
            dlambda = dlambda * weight * (1 - weight)
        return dheads, dlambda.flatten(2).to(lambda_.dtype), None


def _by_group(heads: Tensor, lambda_: Tensor, sigmoid: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return signal heads, noise heads and lambda by group, in fp32 or wider.

    The shapes are `[b, s, groups, r, d]`, `[b, s, groups, 1, d]` and `[b, s, groups, r, 1]`.
    """
    dtype = torch.promote_types(heads.dtype, torch.float32)
    groups = heads.shape[2] - lambda_.shape[2]
    by_group = heads.to(dtype).unflatten(2, (groups, -1))
    lambda_ = lambda_.to(dtype)
    weight = (lambda_.sigmoid() if sigmoid else lambda_).unflatten(2, (groups, -1)).unsqueeze(-1)
    return by_group[:, :, :, :-1], by_group[:, :, :, -1:], weight
