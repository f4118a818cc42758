"""Sums over tensor-parallel ranks of partial gradients of replicated parameters.

Every tensor-parallel rank holds a copy of the small parameters. For lambda and the headwise norm,
the backward pass yields the contribution of the rank's own heads. Under sequence parallelism, the
layers' norms and LoRA's matrices get the contribution of the rank's part of the sequence. The sum
of the contributions is the gradient. As a sum is linear, it can be taken once per step in float32,
after all microbatches and after the data-parallel average. Otherwise a 3B network would wait for
200 tiny all-reduces in every microbatch. Megatron's data-parallel wrapper takes these sums too, but
DeepSpeed replaces it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.flat_gradients import FlatGradients


def shared_parameters(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the trained parameters with a partial gradient on each tensor-parallel rank.

    They are marked by ``sequence_parallel`` (Megatron) or ``has_partial_gradient``
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
    """Return the views of some parameters in flat gradients, in the order of the flat tensors."""
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
    """Sum each gradient as soon as a backward pass completes it.

    ZeRO 2, ZeRO 3 and the offloaded optimizer need this, because they partition it at once.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        parameter.register_hook(summed)
