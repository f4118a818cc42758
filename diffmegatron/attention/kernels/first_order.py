"""A refusal of second derivatives, as torch's ``once_differentiable``, but also of the inputs'."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def first_order(backward: Backward) -> Backward:
    """Decorate the backward of an autograd Function that saves its inputs, under staticmethod.

    torch's `once_differentiable` hangs its error on the gradients alone, and only where the
    incoming gradient requires one: `autograd.grad` towards the inputs passes it by, and leaves out
    the second derivative without a word. Here the error comes between the gradients and all
    that they were computed from.
    """

    @wraps(backward)
    def compute(ctx: Any, *grads: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, *grads)
        # Autograd enables gradients in a backward pass only if it is to be differentiated.
        if not torch.is_grad_enabled():
            return found
        gradients: Gradients = _Refusal.apply(len(found), *found, *ctx.saved_tensors, *grads)
        return gradients

    return compute


class _Refusal(torch.autograd.Function):
    """The identity of the first tensors, which autograd sees as computed from all others."""

    @staticmethod
    def forward(_: Any, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if x is None else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Gradients:
        raise RuntimeError(
            "the attention kernels have no second derivative; backend='reference' has one"
        )
