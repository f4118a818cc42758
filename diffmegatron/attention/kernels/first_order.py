"""A decorator for autograd functions that have no second derivative.

An attempt to compute it raises an error, also where torch's ``once_differentiable`` would silently
return wrong results.
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

    Computing a second derivative then raises an error. The Function must save its inputs with
    ``save_for_backward``. Apply this decorator below ``staticmethod``.

    torch's `once_differentiable` is not enough. It adds a node that raises an error, but only if
    the incoming gradient requires a gradient, and it links the node only to that incoming gradient,
    not to the Function's inputs. `autograd.grad` with respect to the inputs therefore never reaches
    the node, and silently omits the second derivative. This decorator links the returned gradients
    to the incoming gradients and to all saved tensors, through a function whose backward raises the
    error.
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
    """Copies of the first `count` tensors; differentiating the copies raises an error.

    The values of the other tensors are not used. They are arguments only so that autograd treats
    the results as functions of them.
    """

    @staticmethod
    def forward(_: Any, count: int, *tensors: Tensor | None) -> Gradients:
        return tuple(None if x is None else x.clone() for x in tensors[:count])

    @staticmethod
    def backward(_: Any, *__: Tensor) -> Gradients:
        raise RuntimeError(
            "the attention kernels have no second derivative; backend='reference' has one"
        )
