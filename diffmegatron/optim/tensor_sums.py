"""Reduction over tensor-parallel ranks of the gradients of replicated parameters.

Some small parameters are replicated on all tensor-parallel ranks, but the backward pass on a rank
computes only a part of their gradient:

- for differential attention's lambda and headwise norms, the contribution of the rank's heads;
- under sequence parallelism, for the layers' norms and LoRA's matrices, the contribution of the
  rank's range of the sequence.

The gradient is the sum over the ranks. A sum is linear, so with ZeRO 1 it is computed only once per
step in float32, after all microbatches and after the data-parallel average (:func:`sum_together`).
If it were computed in every microbatch, a network with 3B parameters would wait for 200 tiny
all-reduces each time. ZeRO 2, ZeRO 3 and an offloaded optimizer consume gradients during the
backward pass, so with them the sum must be computed in every microbatch (:func:`sum_in_backward`).
Megatron's data-parallel wrapper also computes these sums, but DeepSpeed is used instead of this
wrapper.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.flat_gradients import FlatGradients


def shared_parameters(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters of which each tensor-parallel rank has a partial gradient.

    They are marked by one of two attributes: ``sequence_parallel``, set by Megatron, or
    ``has_partial_gradient``, set by
    :class:`~diffmegatron.attention.self_attention.SelfAttention`.
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
    """Return the gradients of some parameters as views into the flat gradients.

    The flat gradients are the 1-dim tensors, one per parameter group, in which ZeRO 1 accumulates
    all gradients. The result has the order of the gradients in these tensors, which is the same on
    every rank.
    """
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
    """Register hooks that sum each gradient over the group as soon as autograd has computed it.

    ZeRO 2, ZeRO 3 and an offloaded optimizer need this, because they consume a gradient immediately
    after its computation, so it cannot be summed later.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        parameter.register_hook(summed)
