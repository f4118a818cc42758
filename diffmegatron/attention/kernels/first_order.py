"""An error for second derivatives, like torch's ``once_differentiable``, but for inputs too."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def first_order(backward: Backward) -> Backward:
    """Decorate the backward of an autograd Function that saves its inputs, under staticmethod.

    torch's `once_differentiable` attaches its error to the gradients only, and only if the incoming
    gradient requires a gradient. `autograd.grad` with respect to the inputs does not reach the
    error, and silently omits the second derivative. Here autograd meets the error between the
    gradients and all tensors from which they were computed.
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
    """The identity of the first tensors, which for autograd depend on all other tensors."""

    @staticmethod
    def forward(_: Any, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if x is None else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Gradients:
        raise RuntimeError(
            "the attention kernels have no second derivative; backend='reference' has one"
        )
