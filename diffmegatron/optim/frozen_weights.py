"""Access to frozen weights for checkpoints.

Frozen weights have no optimizer state, so they are saved from the network. The ranks of a
data-parallel group divide each frozen weight into equal ranges; each rank saves and loads its
range.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


class FrozenWeights:
    """Frozen weights of a network, divided into one range per rank of a data-parallel group.

    ``network`` is initialized by DeepSpeed, and ``group`` are the ranks that train the same shard.
    """

    def __init__(self, network: torch.nn.Module, group: ProcessGroup) -> None:
        self._parameters = [p for p in network.parameters() if not p.requires_grad]
        self._group = group

    def ranges(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield this rank's range of each frozen parameter, unless the range is empty.

        Yields:
            The parameter; the index of the range's first element in the flattened parameter; and
            the values of the range [n], a view. After writing to the views, call :meth:`refresh`.
        """
        for parameter in self._parameters:
            weight = _full_weight(parameter)
            if weight is None:
                size, flat = parameter.ds_tensor.ds_numel, parameter.ds_tensor.data  # type: ignore[attr-defined]
                start = distributed.get_rank(self._group) * size
                held = flat[: max(0, parameter.ds_numel - start)]  # type: ignore[attr-defined]
            else:
                start = self._range_size(weight) * distributed.get_rank(self._group)
                held = weight.view(-1)[start : start + self._range_size(weight)]
            if held.numel():
                yield parameter, start, held

    def refresh(self) -> None:
        """Copy every rank's range to all ranks, for weights of which each rank has a full copy.

        All ranks must call this method.
        """
        for parameter in self._parameters:
            weight = _full_weight(parameter)
            if weight is None:  # ZeRO 3 gathers the ranges before each use.
                continue
            ranks = distributed.get_world_size(self._group)
            padded = weight.new_zeros(ranks * self._range_size(weight))
            padded[: weight.numel()] = weight.view(-1)
            ranges = list(padded.chunk(ranks))
            distributed.all_gather(
                ranges, ranges[distributed.get_rank(self._group)].clone(), self._group
            )
            weight.copy_(padded[: weight.numel()].view_as(weight))

    def _range_size(self, weight: Tensor) -> int:
        return -(-weight.numel() // distributed.get_world_size(self._group))


def _full_weight(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the unpartitioned weight; None if this rank stores only its ZeRO 3 partition."""
    exact: Tensor | None = getattr(parameter, "exact", None)
    if exact is not None:
        return exact
    return None if hasattr(parameter, "ds_tensor") else parameter.data
