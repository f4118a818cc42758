"""Access to a rank's weights and gradients in DeepSpeed's optimizer and in the network.

A rank's master weights are in flat master tensors (float32 [n]), the keys of torch's Adam state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ElementRange:
    """A range of a parameter's elements, stored in a flat master tensor as ``flat[where]``.

    ``start`` is the index of the range's first element in the flattened parameter.
    """

    flat: Tensor
    where: slice
    start: int

    @property
    def values(self) -> Tensor:
        """Master weights of the range, a view of ``flat``."""
        return self.flat.data[self.where]

    @property
    def elements(self) -> slice:
        """Indices of the range in the flattened parameter."""
        return slice(self.start, self.start + self.where.stop - self.where.start)


class Partition:
    """Partition of ZeRO 1 and 2: each rank stores a slice of each flattened parameter group."""

    def __init__(self, zero_optimizer: Any) -> None:
        self._optimizer = zero_optimizer

    @property
    def flats(self) -> list[Tensor]:
        """Flat master tensors of this rank."""
        return [group["params"][0] for group in self._optimizer.param_groups]

    def range_of(self, parameter: torch.nn.Parameter) -> ElementRange | None:
        """Return the range of a parameter that this rank stores; None if it stores no element."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        where = mapping.hp_fragment_address
        return ElementRange(
            self.flats[mapping.param_group_index],
            slice(where.start, where.start + where.numel),
            mapping.lp_fragment_address.start,
        )

    def ranges(self, ranks: int) -> Iterator[tuple[torch.nn.Parameter, Tensor, list[slice]]]:
        """Yield (parameter, its flat master tensor, elements on each data x context rank).

        ``ranks`` is the number of these ranks. The elements are those of the flattened parameter.
        """
        optimizer = self._optimizer
        groups = getattr(optimizer, "bf16_groups", None) or optimizer.bit16_groups
        for flat, parameters in zip(self.flats, groups, strict=True):
            first = 0
            for parameter in parameters:
                edges = [rank * flat.numel() - first for rank in range(ranks + 1)]
                yield parameter, flat, _slices(edges, parameter.numel())
                first += parameter.numel()

    def refresh(self) -> None:
        """Set the network's weights from the master weights of all ranks."""
        self._optimizer.update_lp_params()

    def clean_up(self) -> None:
        """Clean up after DeepSpeed has dropped the gradients of a step; call it on all ranks."""
        # DeepSpeed 0.19.8 keeps these float32 buffers of an offloaded bf16 optimizer when it drops
        # a step. Without this reset, later gradients would be added to values that are not finite.
        buffers = getattr(self._optimizer, "averaged_gradients", {})
        buffers.update(dict.fromkeys(buffers))

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """Yield (parameter, this rank's part of its gradient) from DeepSpeed's lists."""
        # DeepSpeed has a group's gradients in one of two lists, which also contain padding tensors.
        for group, parameters in enumerate(getattr(self._optimizer, "params_in_partition", [])):
            gradients = self._optimizer.averaged_gradients.get(group)
            if gradients is None:
                gradients = self._optimizer.all_grad_tensors.get(group) or []
            real = (each for each in gradients if not getattr(each, "_zero_padding", False))
            yield from zip(parameters, real, strict=False)


class _ParameterPartition(Partition):
    """Partition of ZeRO 3: each rank stores an equal, padded range of each parameter."""

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

    def ranges(self, ranks: int) -> Iterator[tuple[torch.nn.Parameter, Tensor, list[slice]]]:
        for flat, parameters in zip(self.flats, self._optimizer.fp16_groups, strict=True):
            for parameter in parameters:
                *_, size = self._optimizer.grad_position[self._optimizer.get_param_id(parameter)]
                edges = [rank * size for rank in range(ranks + 1)]
                yield parameter, flat, _slices(edges, parameter.ds_numel)

    def refresh(self) -> None:
        for group in range(len(self.flats)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(group)
        self.clean_up()

    def clean_up(self) -> None:
        # DeepSpeed does not gather small parameters at the end of a step that it dropped.
        # The report of this step needs them to compute lambda.
        persistent = self._optimizer.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)

    def gradients(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        for group, parameters in enumerate(self._optimizer.fp16_groups):
            held = self._optimizer.averaged_gradients.get(group)
            if held is not None:
                yield from zip(parameters, held, strict=True)


def _slices(edges: Sequence[int], numel: int) -> list[slice]:
    """Return the slices between edges, cut to the indices 0 to ``numel``."""
    inside = (min(max(edge, 0), numel) for edge in edges)
    return [slice(start, stop) for start, stop in pairwise(inside)]


def partition_of(zero_optimizer: Any) -> Partition:
    """Return the partition of DeepSpeed's optimizer, for any ZeRO stage."""
    if hasattr(zero_optimizer, "fp32_partitioned_groups_flat"):
        return _ParameterPartition(zero_optimizer)
    return Partition(zero_optimizer)


def keep_own_gradients(zero_optimizer: Any) -> None:
    """Make DeepSpeed's ZeRO 2 optimizer keep only this rank's gradient elements.

    With bf16 weights, DeepSpeed adds the elements to one flat tensor in each microbatch, but keeps
    a reduced gradient that exceeds the bucket until the end of the backward pass. With float32
    weights, it keeps the whole gradient of each parameter of which this rank has an element, for
    two microbatches at once. An embedding of 1.2 GB took 2.4 GB on each of its ranks.

    With other ZeRO stages or an offloaded optimizer, this function changes nothing.
    """
    if not getattr(zero_optimizer, "partition_gradients", False) or zero_optimizer.cpu_offload:
        return

    def clear(parameter: torch.nn.Parameter, _: int) -> None:
        zero_optimizer.clear_grad_attribute(parameter)

    zero_optimizer._use_compact_grad_partition_buffer = lambda _: True
    zero_optimizer.copy_grads_in_partition = clear


class FrozenWeights:
    """Frozen weights for checkpoints, each divided into one range per data-parallel rank."""

    def __init__(self, network: torch.nn.Module, group: ProcessGroup) -> None:
        self._parameters = [p for p in network.parameters() if not p.requires_grad]
        self._group, self._rank, self._ranks = group, group.rank(), group.size()

    def ranges(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield this rank's range of each frozen parameter: (parameter, start index, view [n]).

        After writing to the views, call :meth:`refresh`.
        """
        for parameter in self._parameters:
            weight = _full_weight(parameter)
            if weight is None:
                start = self._rank * parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
                numel = max(0, parameter.ds_numel - start)  # type: ignore[attr-defined]
                held = parameter.ds_tensor.data[:numel]  # type: ignore[attr-defined]
            else:
                size = self._range_size(weight)
                start = self._rank * size
                held = weight.view(-1)[start : start + size]
            if held.numel():
                yield parameter, start, held

    def refresh(self) -> None:
        """Copy every rank's ranges to all ranks; call it on all ranks."""
        for parameter in self._parameters:
            weight = _full_weight(parameter)
            if weight is None:  # ZeRO 3 gathers the ranges before each use.
                continue
            padded = weight.new_zeros(self._ranks * self._range_size(weight))
            padded[: weight.numel()] = weight.view(-1)
            ranges = list(padded.chunk(self._ranks))
            distributed.all_gather(ranges, ranges[self._rank].clone(), self._group)
            weight.copy_(padded[: weight.numel()].view_as(weight))

    def _range_size(self, weight: Tensor) -> int:
        return -(-weight.numel() // self._ranks)


def _full_weight(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the unpartitioned weight; None if this rank stores only its ZeRO 3 partition."""
    exact: Tensor | None = getattr(parameter, "exact", None)
    if exact is not None:
        return exact
    return None if hasattr(parameter, "ds_tensor") else parameter.data


class ExactValues:
    """Float32 copies of lambda vectors and headwise norms, for bf16 models under ZeRO 3.

    ZeRO 3 flattens all weights of a rank into one bf16 buffer (``defragment`` in
    runtime/zero/stage3.py). The attention therefore computes with the parameter's attribute
    ``exact``, a float32 copy of the whole weight. ``values`` are the weights before DeepSpeed
    rounded them. The constructor copies ``values`` to ``exact`` and to the master weights.
    """

    def __init__(
        self, values: Mapping[torch.nn.Parameter, Tensor], partition: Partition, group: ProcessGroup
    ) -> None:
        self._partition, self._group = partition, group
        self._parameters = [parameter for parameter in values if parameter.requires_grad]
        for parameter, value in values.items():
            parameter.exact = value.clone()  # type: ignore[attr-defined]
            held = partition.range_of(parameter) if parameter.requires_grad else None
            if held is not None:
                held.values.copy_(value.flatten()[held.elements])

    def refresh(self) -> None:
        """Set ``exact`` of each trained parameter to its master weight; call it on all ranks."""
        if not self._parameters:
            return
        exact: list[Tensor] = [parameter.exact for parameter in self._parameters]  # type: ignore[attr-defined]
        # Sum the partitions of all ranks, each padded with zeros.
        total = torch.cat([torch.zeros_like(weight).flatten() for weight in exact])
        flattened = total.split([weight.numel() for weight in exact])
        for parameter, padded in zip(self._parameters, flattened, strict=True):
            held = self._partition.range_of(parameter)
            if held is not None:
                padded[held.elements] = held.values
        distributed.all_reduce(total, group=self._group)
        for weight, value in zip(exact, flattened, strict=True):
            weight.copy_(value.view_as(weight))
