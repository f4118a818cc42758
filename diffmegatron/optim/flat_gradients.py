"""The gradients of ZeRO 1, each parameter group's end to end in one float32 tensor.

What lies flat from the start is summed over the ranks where it lies. DeepSpeed's own reduction
copies it first: in bf16 all gradients of the rank end to end once more
(``buffered_allreduce_fallback`` in runtime/engine.py); in float32 every gradient into a bucket, out
of it and into two further buffers (``reduce_gradients`` in runtime/zero/stage_1_and_2.py), most of
the time of a small update on a CPU.
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
        flat: float32 [n], those of ``parameters`` one after the other, and padding at the end.
        parameters: of the group.
    """

    flat: Tensor
    parameters: Sequence[torch.nn.Parameter]

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Each parameter and its gradient, a view into ``flat`` of the parameter's shape."""
        start = 0
        for parameter in self.parameters:
            yield parameter, self.flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


class FlatGradients(Protocol):
    """All that a rank accumulates, on every rank of its data-parallel group in the same order."""

    @property
    def groups(self) -> Sequence[FlatGroup]:
        """Of every parameter group."""

    def hand_over(self) -> None:
        """Put the gradients where DeepSpeed's step finds what it would have reduced."""

    def reset(self) -> None:
        """Make the gradients of the next step zero, after DeepSpeed's step."""


def flat_gradients(zero_optimizer: Any) -> FlatGradients | None:
    """Those of ZeRO 1 with its state on the device; None for any other optimizer of DeepSpeed's."""
    if hasattr(zero_optimizer, "fp32_groups_gradients_flat"):
        return _OfBf16Optimizer(zero_optimizer)
    if getattr(zero_optimizer, "partition_gradients", True) or zero_optimizer.cpu_offload:
        return None
    return _OfZeroOptimizer(zero_optimizer)


class _OfBf16Optimizer:
    """In bf16, where DeepSpeed's BF16_Optimizer keeps them so itself.

    Its hooks make a float32 copy of a gradient before they add it to the others, 4 bytes for each
    element of the largest matrix while the loss is differentiated. Ours add the bf16 one, which
    gives the same bits: the sum is in float32 either way.
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
        # In its list, so that the engine removes them at its end.
        zero_optimizer._grad_acc_hooks[:] = [
            parameter.register_post_accumulate_grad_hook(
                partial(_add, zero_optimizer, (number, place), gradient)
            )
            for number, group in enumerate(self.groups)
            for place, (parameter, gradient) in enumerate(group.gradients())
        ]

    def hand_over(self) -> None:
        """They are there."""

    def reset(self) -> None:
        """DeepSpeed's step has done it."""


def _add(
    zero_optimizer: Any, place: tuple[int, int], total: Tensor, parameter: torch.nn.Parameter
) -> None:
    """Add a parameter's gradient to the float32 one and free it, as DeepSpeed's hook does.

    Args:
        zero_optimizer: DeepSpeed's, which counts gradients by ``place``.
        place: number of the parameter group, and of the parameter in it.
        total: the float32 gradient, in the parameter's shape.
        parameter: which has a new gradient.
    """
    assert parameter.grad is not None
    total.add_(parameter.grad)
    parameter.grad = None
    parameter._hp_grad = total  # type: ignore[attr-defined]
    number, index = place
    zero_optimizer.fp32_groups_has_gradients[number][index] = True


class _OfZeroOptimizer:
    """In float32: the backward pass adds to parts of the flat tensors in place of new ones."""

    def __init__(self, zero_optimizer: Any) -> None:
        self._optimizer = zero_optimizer
        # The norm, which is summed in float64, is finite where all gradients are.
        zero_optimizer.check_grad_overflow = False
        # For every parameter they count gradients and allocate buckets that stay empty.
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
        self._lend()

    def hand_over(self) -> None:
        for number, own in enumerate(self._own):
            self._optimizer.averaged_gradients[number] = own
        self._optimizer._release_ipg_buffers()

    def reset(self) -> None:
        for group in self.groups:
            group.flat.zero_()
        self._lend()

    def _own_partition(self, number: int) -> Any:
        """This rank's slice of a group, as the list of views that DeepSpeed makes of one."""
        own = self._optimizer._build_compact_grad_partition_buffer(number)
        rank = self._optimizer.real_dp_process_group[number].rank()
        size = own.flat_partition.numel()
        own.flat_partition = self.groups[number].flat[rank * size : (rank + 1) * size]
        # Its way to rebuild the views, here of another tensor on the same device.
        own.move_flat_partition(own.flat_partition.device)
        return own

    def _lend(self) -> None:
        for group in self.groups:
            for parameter, gradient in group.gradients():
                parameter.grad = gradient
