"""Float32 parameters of a bf16 model under ZeRO 3, which keeps all weights in one dtype.

DeepSpeed flattens every parameter's partition into one buffer (``defragment`` in
runtime/zero/stage3.py). Lambda vectors and headwise norms are therefore bf16 parameters with
float32 master weights there, like all others. Each also has its whole master weight in the
attribute ``exact``, and the core attention computes with that.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.partition import Partition


class ExactValues:
    """Whole float32 master weights of a few small parameters on every rank.

    Args:
        values: float32 values of the parameters before rounding.
        partition: master weights, which are set to these values.
        group: ranks over which ZeRO partitions.
    """

    def __init__(
        self,
        values: Mapping[torch.nn.Parameter, Tensor],
        partition: Partition,
        group: ProcessGroup,
    ) -> None:
        self._partition, self._group = partition, group
        # Frozen parameters need no refresh.
        self._parameters = [parameter for parameter in values if parameter.requires_grad]
        for parameter, value in values.items():
            parameter.exact = value.clone()  # type: ignore[attr-defined]
            held = partition.range_of(parameter) if parameter.requires_grad else None
            if held is not None:
                size = held.where.stop - held.where.start
                held.flat.data[held.where] = value.flatten()[held.start : held.start + size]

    def refresh(self) -> None:
        """Gather the master weights of all parameters in one all-reduce."""
        if not self._parameters:
            return
        exact: list[Tensor] = [parameter.exact for parameter in self._parameters]  # type: ignore[attr-defined]
        parts = torch.cat([self._own_part(p) for p in self._parameters])
        distributed.all_reduce(parts, group=self._group)
        for whole, value in zip(exact, parts.split([x.numel() for x in exact]), strict=True):
            whole.copy_(value.view_as(whole))

    def _own_part(self, parameter: torch.nn.Parameter) -> Tensor:
        """Return the flattened parameter with this rank's elements, and zeros elsewhere."""
        part = torch.zeros_like(parameter.exact).flatten()  # type: ignore[attr-defined]
        held = self._partition.range_of(parameter)
        if held is not None:
            size = held.where.stop - held.where.start
            part[held.start : held.start + size] = held.flat.data[held.where]
        return part
