"""Location of DeepSpeed's float32 master weights, by ZeRO stage.

Every stage has flat float32 tensors, by which the optimizer keys its Adam state. The stages differ
in which elements of which parameter a flat tensor holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class ElementRange:
    """A range of one parameter's elements in a flat master tensor of this rank.

    Attributes:
        flat: master tensor, float32 [n].
        where: range in the master tensor.
        start: first element of the range in the flattened parameter.
    """

    flat: Tensor
    where: slice
    start: int


class Partition(Protocol):
    """Master weights of this rank under any ZeRO stage."""

    @property
    def flats(self) -> list[Tensor]:
        """Flat master tensors, float32 [n], which are the keys of the optimizer's state."""

    def range_of(self, parameter: torch.nn.Parameter) -> ElementRange | None:
        """Return the elements of a parameter that this rank holds; None if there are none."""

    def refresh(self) -> None:
        """Update the network's weights from the master weights."""

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield gradients that the engine holds itself, not on their parameters."""


def partition_of(zero_optimizer: Any) -> Partition:
    """Return the partition of DeepSpeed's optimizer of any stage."""
    if hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        return _ParameterPartition(zero_optimizer)
    return _GroupPartition(zero_optimizer)


class _GroupPartition:
    """Partition of ZeRO 1 and 2: each parameter group is flat, and this rank holds a slice."""

    def __init__(self, zero_optimizer: Any) -> None:
        self._optimizer = zero_optimizer

    @property
    def flats(self) -> list[Tensor]:
        return [group["params"][0] for group in self._optimizer.param_groups]

    def range_of(self, parameter: torch.nn.Parameter) -> ElementRange | None:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        where = mapping.hp_fragment_address
        return ElementRange(
            self.flats[mapping.param_group_index],
            slice(where.start, where.start + where.numel),
            mapping.lp_fragment_address.start,
        )

    def refresh(self) -> None:
        self._optimizer.update_lp_params()

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        # ZeRO 2 leaves no gradients on the parameters. Its partition, with padding in between, is
        # in averaged_gradients, or all_grad_tensors if gradients accumulate in the model's dtype.
        for group, parameters in enumerate(getattr(self._optimizer, "params_in_partition", [])):
            gradients = self._optimizer.averaged_gradients.get(group)
            if gradients is None:
                gradients = self._optimizer.all_grad_tensors.get(group) or []
            real = (each for each in gradients if not getattr(each, "_zero_padding", False))
            yield from zip(parameters, real, strict=False)


class _ParameterPartition:
    """Partition of ZeRO 3: each parameter is cut into equal parts, the last one padded."""

    def __init__(self, zero_optimizer: Any) -> None:
        self._optimizer = zero_optimizer

    @property
    def flats(self) -> list[Tensor]:
        return self._optimizer.fp32_partitioned_groups_flat

    def range_of(self, parameter: torch.nn.Parameter) -> ElementRange | None:
        group, offset, size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
        start = self._optimizer._get_param_partition_rank(parameter) * size
        held = min(size, parameter.ds_numel - start)  # type: ignore[attr-defined]
        if held <= 0:
            return None
        return ElementRange(self.flats[group], slice(offset, offset + held), start)

    def refresh(self) -> None:
        for group in range(len(self.flats)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        for group, parameters in enumerate(self._optimizer.fp16_groups):
            held = self._optimizer.averaged_gradients.get(group)
            if held is not None:
                yield from zip(parameters, held, strict=True)
