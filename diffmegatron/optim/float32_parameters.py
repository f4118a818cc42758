"""Parameters that must be float32 in a bf16 model under ZeRO 3: lambda vectors and headwise norms.

ZeRO 3 flattens all partitions into one bf16 buffer (``defragment`` in runtime/zero/stage3.py). The
core attention therefore computes with a float32 copy of the master weight, ``parameter.exact``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.optim.partition import Partition


class ExactValues:
    """Copies of the float32 master weights of a few small parameters, in their attribute ``exact``.

    ``values`` are the parameters before DeepSpeed rounded them to bf16. The constructor also writes
    them into the master weights of trained parameters.
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
