"""Flat float32 gradients for ZeRO 1: one 1-dim tensor per parameter group.

The backward pass accumulates in the flat tensors, so their reduction over ranks needs no copy.
DeepSpeed's own reduction would copy the gradients.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class FlatGroup:
    """The flattened gradients of ``parameters``, one after the other in ``flat`` (float32 [n])."""

    flat: Tensor
    parameters: Sequence[torch.nn.Parameter]

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield each parameter and its gradient, a view of ``flat`` in the parameter's shape."""
        start = 0
        for parameter in self.parameters:
            yield parameter, self.flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


class FlatGradients:
    """A rank's accumulated gradients, in the same order on all data-parallel ranks."""

    def __init__(
        self,
        zero_optimizer: Any,
        flats: Iterable[Tensor],
        parameters: Iterable[Sequence[torch.nn.Parameter]],
    ) -> None:
        self.groups = [FlatGroup(*each) for each in zip(flats, parameters, strict=True)]
        self._optimizer = zero_optimizer
        for hook in zero_optimizer._grad_acc_hooks:
            hook.remove()
        zero_optimizer._grad_acc_hooks.clear()

    def add_pending(self) -> None:
        """Add the gradients that wait to be added together; call it before you read ``groups``."""

    def assign_to_optimizer(self) -> None:
        """Assign the reduced gradients to the attributes that DeepSpeed's step reads."""

    def reset(self) -> None:
        """Set the gradients to zero, if DeepSpeed's step has not done it."""


def flat_gradients(zero_optimizer: Any) -> FlatGradients | None:
    """Replace the gradient hooks of DeepSpeed's ZeRO 1 optimizer, and return its flat gradients.

    With other ZeRO stages or an offloaded optimizer, return None.
    """
    if hasattr(zero_optimizer, "fp32_groups_gradients_flat"):
        return _Bf16Gradients(zero_optimizer)
    if getattr(zero_optimizer, "partition_gradients", True) or zero_optimizer.cpu_offload:
        return None
    return _Float32Gradients(zero_optimizer)


class _Bf16Gradients(FlatGradients):
    """DeepSpeed's flat float32 gradients of a bf16 model, with hooks that add without a copy.

    The float32 parameters of a bf16 model are small vectors (lambdas and norms of heads). Their
    gradients of a microbatch are added in one kernel.
    """

    def __init__(self, zero_optimizer: Any) -> None:
        super().__init__(
            zero_optimizer, zero_optimizer.fp32_groups_gradients_flat, zero_optimizer.bf16_groups
        )
        # Total and new gradient of each parameter whose gradient is not yet added.
        self._pending: dict[torch.nn.Parameter, tuple[Tensor, Tensor]] = {}
        # When DeepSpeed's engine is destroyed, it removes the hooks in this list.
        zero_optimizer._grad_acc_hooks += [
            parameter.register_post_accumulate_grad_hook(
                partial(self._take, (number, place), gradient)
            )
            for number, group in enumerate(self.groups)
            for place, (parameter, gradient) in enumerate(group.gradients())
        ]

    def _take(self, place: tuple[int, int], total: Tensor, parameter: torch.nn.Parameter) -> None:
        """Add a new gradient to the float32 ``total``, or put it off until `add_pending`.

        ``place`` is (index of the parameter group, index of the parameter in the group).
        """
        gradient = parameter.grad
        assert gradient is not None
        if gradient.dtype == torch.float32:
            if parameter in self._pending:
                self.add_pending()
            self._pending[parameter] = total, gradient
        else:
            total.add_(gradient)
        parameter.grad = None
        parameter._hp_grad = total  # type: ignore[attr-defined]
        number, index = place
        self._optimizer.fp32_groups_has_gradients[number][index] = True

    def add_pending(self) -> None:
        if self._pending:
            totals, gradients = zip(*self._pending.values(), strict=True)
            torch._foreach_add_(totals, gradients)
            self._pending.clear()


class _Float32Gradients(FlatGradients):
    """Gradients of a float32 model; each ``parameter.grad`` is a view of a flat tensor."""

    def __init__(self, zero_optimizer: Any) -> None:
        flats = [torch.zeros_like(weights) for weights in zero_optimizer.bit16_groups_flat]
        super().__init__(zero_optimizer, flats, zero_optimizer.bit16_groups)
        # ZeroEngine.step checks that the gradients are finite, so skip DeepSpeed's own check.
        zero_optimizer.check_grad_overflow = False
        self._own = [self._own_partition(number) for number in range(len(self.groups))]
        self._assign_views()

    def assign_to_optimizer(self) -> None:
        for number, own in enumerate(self._own):
            self._optimizer.averaged_gradients[number] = own
        self._optimizer._release_ipg_buffers()

    def reset(self) -> None:
        for group in self.groups:
            group.flat.zero_()
        self._assign_views()

    def _own_partition(self, number: int) -> Any:
        """Return DeepSpeed's buffer object for this rank's slice of a group's flat tensor."""
        own = self._optimizer._build_compact_grad_partition_buffer(number)
        rank = self._optimizer.real_dp_process_group[number].rank()
        size = own.flat_partition.numel()
        own.flat_partition = self.groups[number].flat[rank * size : (rank + 1) * size]
        # Replace the buffer's views of the old tensor by views of the new one.
        own.move_flat_partition(own.flat_partition.device)
        return own

    def _assign_views(self) -> None:
        for group in self.groups:
            for parameter, gradient in group.gradients():
                parameter.grad = gradient
