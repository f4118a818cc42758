"""Sums over tensor-parallel ranks of the gradients that each of them sees a share of.

Every tensor-parallel rank holds a copy of the small parameters: of lambda and the headwise norm its
backward pass sees the share of the rank's own heads, and under sequence parallelism of the layers'
norms and of LoRA's matrices the share of its part of the sequence. The shares add up to the
gradient. A sum is linear, so it may be taken once per step, after all microbatches and after the
average over data-parallel ranks, in float32: a 3B network would otherwise wait for 200 tiny
all-reduces in every microbatch. Megatron's own data-parallel wrapper takes such sums too; DeepSpeed
replaces it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.flat_gradients import FlatGradients


def shared_parameters(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters of which each tensor-parallel rank sees a share of the gradient.

    They carry ``sequence_parallel``, Megatron's mark, or ``has_partial_gradient``
    (:class:`~diffmegatron.attention.self_attention.SelfAttention`).
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
    """Where flat gradients keep those of some parameters, in the order of the flat tensors."""
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
    """Sum each gradient whenever a backward pass completes it.

    For ZeRO 2 and 3 and the offloaded optimizer, which partition a gradient at once.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        parameter.register_hook(summed)
