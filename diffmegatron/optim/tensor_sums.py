"""Reduction over tensor-parallel ranks of the gradients of replicated parameters.

A rank computes only a part of the gradient of some small parameters: of lambda and headwise norms
the part of its heads; under sequence parallelism, of norms and LoRA's matrices the part of its
positions. With ZeRO 1, the parts are summed once per step (:func:`sum_together`). With ZeRO 2, ZeRO
3 and an offloaded optimizer, the backward pass sums them (:func:`sum_in_backward`), because it also
consumes the gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.flat_gradients import FlatGradients


def shared_parameters(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters of which each tensor-parallel rank has a partial gradient.

    Megatron sets ``sequence_parallel``, and ``SelfAttention`` sets ``has_partial_gradient``.
    """
    return [
        parameter
        for parameter in network.parameters()
        if parameter.requires_grad
        and (
            getattr(parameter, "sequence_parallel", False)
            or getattr(parameter, "has_partial_gradient", False)
        )
    ]


def gradients_of(
    parameters: Sequence[torch.nn.Parameter], gradients: FlatGradients
) -> list[Tensor]:
    """Return the gradients of some parameters as views into the flat gradients."""
    wanted = set(parameters)
    return [
        gradient
        for group in gradients.groups
        for parameter, gradient in group.gradients()
        if parameter in wanted
    ]


def sum_together(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum float32 gradients over the ranks of a group in place, in one all-reduce."""
    if not gradients:
        return
    total = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(total, group=group)
    parts = total.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        list(gradients), [part.view_as(x) for part, x in zip(parts, gradients, strict=True)]
    )


def sum_in_backward(parameters: Sequence[torch.nn.Parameter], group: ProcessGroup) -> None:
    """Register hooks that sum each gradient over the group as soon as autograd has computed it."""

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        parameter.register_hook(summed)
