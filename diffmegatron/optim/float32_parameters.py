"""Float32 parameters of a bf16 model under ZeRO 3, which keeps all weights in one dtype.

DeepSpeed flattens every parameter's partition into one buffer (``defragment`` in
runtime/zero/stage3.py), so there the lambda vectors and headwise norms are bf16 parameters with
float32 master weights like any other. Each carries its master weight whole, as the attribute
``exact``, and the core attention computes with that.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.partition import Partition


class ExactValues:
    """The whole master weights of a few small parameters on every rank.

    Args:
        values: the parameters with their float32 values before they were rounded.
        partition: where the master weights are; they are given these values.
        group: the ranks that share them.
    """

    def __init__(
        self,
        values: Mapping[torch.nn.Parameter, Tensor],
        partition: Partition,
        group: ProcessGroup,
    ) -> None:
        self._partition, self._group = partition, group
        # What is frozen stays as it is.
        self._parameters = [parameter for parameter in values if parameter.requires_grad]
        for parameter, value in values.items():
            parameter.exact = value.clone()  # type: ignore[attr-defined]
            held = partition.range_of(parameter) if parameter.requires_grad else None
            if held is not None:
                size = held.where.stop - held.where.start
                held.flat.data[held.where] = value.flatten()[held.start : held.start + size]

    def refresh(self) -> None:
        """Take over the master weights, in one all-reduce of all of them together."""
        if not self._parameters:
            return
        exact: list[Tensor] = [parameter.exact for parameter in self._parameters]  # type: ignore[attr-defined]
        parts = torch.cat([self._own_part(p) for p in self._parameters])
        distributed.all_reduce(parts, group=self._group)
        for whole, value in zip(exact, parts.split([x.numel() for x in exact]), strict=True):
            whole.copy_(value.view_as(whole))

    def _own_part(self, parameter: torch.nn.Parameter) -> Tensor:
        """The elements this rank holds, zeros elsewhere."""
        part = torch.zeros_like(parameter.exact).flatten()  # type: ignore[attr-defined]
        held = self._partition.range_of(parameter)
        if held is not None:
            size = held.where.stop - held.where.start
            part[held.start : held.start + size] = held.flat.data[held.where]
        return part
