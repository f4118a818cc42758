"""Frozen weights for checkpoints, as no optimizer state holds them.

Each rank reads and writes its share, like the shares of trained weights under ZeRO.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup


class FrozenWeights:
    """Frozen weights of a network, divided among the ranks that hold the same weights.

    Args:
        network: network that DeepSpeed has initialized.
        group: ranks over which ZeRO partitions.
    """

    def __init__(self, network: torch.nn.Module, group: ProcessGroup) -> None:
        self._parameters = [p for p in network.parameters() if not p.requires_grad]
        self._group = group

    def ranges(self) -> Iterator[tuple[torch.nn.Parameter, int, Tensor]]:
        """Yield each parameter, the first element of this rank's range, and the range [n].

        The range is a view in the network's dtype; writing to it changes only this rank's copy.
        """
        for parameter in self._parameters:
            whole = _whole(parameter)
            if whole is None:
                size, flat = parameter.ds_tensor.ds_numel, parameter.ds_tensor.data  # type: ignore[attr-defined]
                start = distributed.get_rank(self._group) * size
                held = flat[: max(0, parameter.ds_numel - start)]  # type: ignore[attr-defined]
            else:
                start = self._share(whole) * distributed.get_rank(self._group)
                held = whole.view(-1)[start : start + self._share(whole)]
            if held.numel():
                yield parameter, start, held

    def refresh(self) -> None:
        """Copy every rank's range to the whole weights of all ranks."""
        for parameter in self._parameters:
            whole = _whole(parameter)
            if whole is None:  # ZeRO 3 keeps shares only, and gathers them before each use.
                continue
            ranks, share = distributed.get_world_size(self._group), self._share(whole)
            shares = whole.new_zeros(ranks * share)
            shares[: whole.numel()] = whole.view(-1)
            parts = list(shares.chunk(ranks))
            distributed.all_gather(
                parts, parts[distributed.get_rank(self._group)].clone(), self._group
            )
            whole.copy_(shares[: whole.numel()].view_as(whole))

    def _share(self, whole: Tensor) -> int:
        return -(-whole.numel() // distributed.get_world_size(self._group))


def _whole(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the whole weight on this rank; None if the rank has only a share.

    ZeRO 3 in bf16 rounds a float32 parameter, whose true value is then in ``exact``.
    """
    exact: Tensor | None = getattr(parameter, "exact", None)
    if exact is not None:
        return exact
    return None if hasattr(parameter, "ds_tensor") else parameter.data
