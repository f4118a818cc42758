"""Where DeepSpeed keeps the float32 master weights, by ZeRO stage.

Every stage has flat float32 tensors whose Adam state lies in the optimizer under them; the stages
differ in what a flat tensor holds of which parameter.
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
        flat: the master tensor.
        where: the range in it.
        start: first element of the range in the flattened parameter.
    """

    flat: Tensor
    where: slice
    start: int


class Partition(Protocol):
    """This rank's master weights, whatever the ZeRO stage."""

    @property
    def flats(self) -> list[Tensor]:
        """The flat master tensors, float32 [n]; the optimizer keys its state by them."""

    def range_of(self, parameter: torch.nn.Parameter) -> ElementRange | None:
        """What this rank holds of a parameter; None where that is nothing."""

    def refresh(self) -> None:
        """Bring the network's weights up to the master weights."""

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Gradients that the engine holds by itself, not on their parameters."""


def partition_of(zero_optimizer: Any) -> Partition:
    """The partition of DeepSpeed's optimizer of any stage."""
    if hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        return _ParameterPartition(zero_optimizer)
    return _GroupPartition(zero_optimizer)


class _GroupPartition:
    """ZeRO 1 and 2: a parameter group is one flat tensor, and this rank has a slice of it."""

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
        # ZeRO 2 has none left on the parameters: its partition, with padding between, lies in one
        # place where gradients accumulate in the model's dtype and in another where they do not.
        for group, parameters in enumerate(getattr(self._optimizer, "params_in_partition", [])):
            gradients = self._optimizer.averaged_gradients.get(group)
            if gradients is None:
                gradients = self._optimizer.all_grad_tensors.get(group) or []
            real = (each for each in gradients if not getattr(each, "_zero_padding", False))
            yield from zip(parameters, real, strict=False)


class _ParameterPartition:
    """ZeRO 3: each parameter is cut by itself, the last rank's part padded to the others' size."""

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
