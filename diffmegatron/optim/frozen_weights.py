"""Access to frozen weights for checkpoints; frozen weights have no optimizer state."""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


class FrozenWeights:
    """Frozen weights of a network, divided into one range per rank of a data-parallel group."""

    def __init__(self, network: torch.nn.Module, group: ProcessGroup) -> None:
        self._parameters = [p for p in network.parameters() if not p.requires_grad]
        self._group, self._rank, self._ranks = group, group.rank(), group.size()

    def ranges(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield parameter, start index and values (a view, [n]) of this rank's ranges.

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
