"""A decorator for autograd functions that have no second derivative.

It raises an error where torch's ``once_differentiable`` would silently return wrong results.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]
Backward = Callable[..., Gradients]


def first_order(backward: Backward) -> Backward:
    """Decorate the backward of an autograd Function that has no second derivative.

    The Function must save its inputs. Apply this decorator below ``staticmethod``. A second
    derivative then raises an error. torch's `once_differentiable` attaches its error to the
    gradients only, and only if the incoming gradient requires a gradient. `autograd.grad` with
    respect to the inputs does not reach that error, and silently omits the second derivative. Here
    the gradients depend on all tensors from which they were computed, through a function whose
    backward raises the error.
    """

    @wraps(backward)
    def compute(ctx: Any, *grads: Tensor) -> Gradients:
        with torch.no_grad():
            found = backward(ctx, *grads)
        # Autograd enables gradients in a backward pass only with create_graph=True.
        if not torch.is_grad_enabled():
            return found
        gradients: Gradients = _Refusal.apply(len(found), *found, *ctx.saved_tensors, *grads)
        return gradients

    return compute


class _Refusal(torch.autograd.Function):
    """Identity of the first `count` tensors that raises an error when it is differentiated.

    The remaining tensors are inputs for autograd only: the results depend on them.
    """

    @staticmethod
    def forward(_: Any, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if x is None else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Gradients:
        raise RuntimeError(
            "the attention kernels have no second derivative; backend='reference' has one"
        )
