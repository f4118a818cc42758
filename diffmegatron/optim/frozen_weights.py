"""Access to frozen weights for checkpoints.

Trained weights are saved from the optimizer's master weights. Frozen weights have no optimizer
state, so they are saved from the network. The ranks of a data-parallel group divide each frozen
weight into equal ranges, and each rank saves and loads its range.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


class FrozenWeights:
    """Frozen weights of a network, divided into one range per rank of a data-parallel group.

    Args:
        network: network that DeepSpeed has initialized.
        group: data-parallel group over which ZeRO partitions the master weights. Its ranks train
            the same shard of the model.
    """

    def __init__(self, network: torch.nn.Module, group: ProcessGroup) -> None:
        self._parameters = [p for p in network.parameters() if not p.requires_grad]
        self._group = group

    def ranges(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield this rank's range of each frozen parameter.

        Yields:
            The parameter; the index of the range's first element in the flattened parameter; and
            the values of the range [n], a view. Parameters whose range on this rank is empty are
            left out. If every rank has a full copy of a weight, writing to the view changes only
            this rank's copy until :meth:`refresh` is called.
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

        All ranks must call this method after values were written to the views of :meth:`ranges`.
        Weights of which each rank has only a ZeRO 3 partition stay unchanged.
        """
        for parameter in self._parameters:
            weight = _full_weight(parameter)
            if weight is None:  # ZeRO 3 stores only the ranges, and gathers them before each use.
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
    """Return the unpartitioned weight; None if this rank stores only its ZeRO 3 partition.

    In a bf16 model, ZeRO 3 rounds and partitions even the parameters that must be float32. So every
    rank also stores the unrounded, unpartitioned value of such a parameter in its attribute
    ``exact`` (:mod:`~diffmegatron.optim.float32_parameters`). This value is returned.
    """
    exact: Tensor | None = getattr(parameter, "exact", None)
    if exact is not None:
        return exact
    return None if hasattr(parameter, "ds_tensor") else parameter.data
