"""Flat float32 gradients for ZeRO 1, one tensor per parameter group.

Gradients that are flat from the start are reduced over the ranks in place. DeepSpeed's own
reduction copies them first. In bf16 it concatenates all gradients of the rank once more
(``buffered_allreduce_fallback`` in runtime/engine.py). In float32 it copies every gradient into a
bucket, out of it and into two further buffers (``reduce_gradients`` in
runtime/zero/stage_1_and_2.py), which takes most of the time of a small update on a CPU.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatGroup:
    """The gradients of a parameter group.

    Attributes:
        flat: float32 [n], the gradients of ``parameters`` in their order, padded at the end.
        parameters: parameters of the group.
    """

    flat: Tensor
    parameters: Sequence[torch.nn.Parameter]

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield each parameter and its gradient, a view of ``flat`` in the parameter's shape."""
        start = 0
        for parameter in self.parameters:
            yield parameter, self.flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


class FlatGradients(Protocol):
    """Accumulated gradients of a rank, in the same order on every rank of its data group."""

    @property
    def groups(self) -> Sequence[FlatGroup]:
        """Flat gradients of every parameter group."""

    def hand_over(self) -> None:
        """Put the reduced gradients where DeepSpeed's step reads them."""

    def reset(self) -> None:
        """Set the gradients to zero after DeepSpeed's step."""


def flat_gradients(zero_optimizer: Any) -> FlatGradients | None:
    """Return ZeRO 1's flat gradients; None for other stages and for an offloaded optimizer."""
    if hasattr(zero_optimizer, "fp32_groups_gradients_flat"):
        return _Bf16Gradients(zero_optimizer)
    if getattr(zero_optimizer, "partition_gradients", True) or zero_optimizer.cpu_offload:
        return None
    return _Float32Gradients(zero_optimizer)


class _Bf16Gradients:
    """Gradients of a bf16 model, which DeepSpeed's BF16_Optimizer already keeps flat in float32.

    DeepSpeed's hooks copy a gradient to float32 before they add it, which needs 4 bytes per element
    of the largest matrix during the backward pass. The hooks here add the bf16 gradient directly.
    The result is the same to the bit, because the sum is in float32 either way.
    """

    def __init__(self, zero_optimizer: Any) -> None:
        self.groups = [
            FlatGroup(flat, parameters)
            for flat, parameters in zip(
                zero_optimizer.fp32_groups_gradients_flat, zero_optimizer.bf16_groups, strict=True
            )
        ]
        for hook in zero_optimizer._grad_acc_hooks:
            hook.remove()
        # The engine removes the hooks in its list when it ends.
        zero_optimizer._grad_acc_hooks[:] = [
            parameter.register_post_accumulate_grad_hook(
                partial(_add, zero_optimizer, (number, place), gradient)
            )
            for number, group in enumerate(self.groups)
            for place, (parameter, gradient) in enumerate(group.gradients())
        ]

    def hand_over(self) -> None:
        """Do nothing: DeepSpeed reads the gradients where they are."""

    def reset(self) -> None:
        """Do nothing: DeepSpeed's step has set them to zero."""


def _add(
    zero_optimizer: Any, place: tuple[int, int], total: Tensor, parameter: torch.nn.Parameter
) -> None:
    """Add a parameter's gradient to its float32 gradient and free it, as DeepSpeed's hook does.

    Args:
        zero_optimizer: DeepSpeed's optimizer, which marks gradients by ``place``.
        place: index of the parameter group, and of the parameter in it.
        total: float32 gradient in the parameter's shape.
        parameter: parameter with a new gradient.
    """
    assert parameter.grad is not None
    total.add_(parameter.grad)
    parameter.grad = None
    parameter._hp_grad = total  # type: ignore[attr-defined]
    number, index = place
    zero_optimizer.fp32_groups_has_gradients[number][index] = True


class _Float32Gradients:
    """Gradients of a float32 model; the backward pass accumulates into views of flat tensors."""

    def __init__(self, zero_optimizer: Any) -> None:
        self._optimizer = zero_optimizer
        # The norm, summed in float64, is finite exactly if all gradients are.
        zero_optimizer.check_grad_overflow = False
        # DeepSpeed's hooks count gradients and allocate buckets that are not used here.
        for hook in zero_optimizer._grad_acc_hooks:
            hook.remove()
        zero_optimizer._grad_acc_hooks.clear()
        self.groups = [
            FlatGroup(torch.zeros_like(weights), parameters)
            for weights, parameters in zip(
                zero_optimizer.bit16_groups_flat, zero_optimizer.bit16_groups, strict=True
            )
        ]
        self._own = [self._own_partition(number) for number in range(len(self.groups))]
        self._assign_views()

    def hand_over(self) -> None:
        for number, own in enumerate(self._own):
            self._optimizer.averaged_gradients[number] = own
        self._optimizer._release_ipg_buffers()

    def reset(self) -> None:
        for group in self.groups:
            group.flat.zero_()
        self._assign_views()

    def _own_partition(self, number: int) -> Any:
        """Return this rank's slice of a group in DeepSpeed's buffer type with views."""
        own = self._optimizer._build_compact_grad_partition_buffer(number)
        rank = self._optimizer.real_dp_process_group[number].rank()
        size = own.flat_partition.numel()
        own.flat_partition = self.groups[number].flat[rank * size : (rank + 1) * size]
        # This method rebuilds the views, here of another tensor on the same device.
        own.move_flat_partition(own.flat_partition.device)
        return own

    def _assign_views(self) -> None:
        for group in self.groups:
            for parameter, gradient in group.gradients():
                parameter.grad = gradient
