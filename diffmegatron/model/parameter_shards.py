"""Map from each parameter of this rank to the shards of named tensors that it stores.

A named tensor is an unsharded tensor, e.g. ``decoder.layers.3.mlp.linear_fc1.weight``. Its name and
shape come from Megatron-core's ``sharded_state_dict``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from diffmegatron.model.network import Network


@dataclass(frozen=True)
class Shard:
    """A box of a named tensor that this rank stores as a contiguous range of a parameter.

    Attributes:
        name, global_shape: name and shape of the unsharded tensor.
        offset, shape: first index and size of the box along each axis.
        start: index of the box's first element in the flattened parameter of this rank.
        is_primary: whether checkpoints contain this rank's copy of the box; True on one of the
            tensor-parallel and pipeline ranks that store the same box.
    """

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    is_primary: bool

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """Slices of the box in the unsharded tensor, one per axis."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def view(self, parameter: Tensor) -> Tensor:
        """Return a view of the box in ``parameter``, or in another tensor of the same size."""
        return parameter.reshape(-1)[self.start : self.start + self.numel].view(self.shape)


ParameterShards = dict[torch.nn.Parameter, list[Shard]]


def parameter_shards(network: Network) -> ParameterShards:
    """Return the shards of every parameter on this rank, in the order of ``named_parameters``."""
    by_storage: dict[int, list[tuple[ShardedTensor, int]]] = {}
    for stage in network.virtual_stages:
        for tensor, start in _sharded_tensors(stage.sharded_state_dict()):
            base = tensor.data.data_ptr() - start * tensor.data.element_size()
            by_storage.setdefault(base, []).append((tensor, start))
    table = {}
    for name, parameter in network.named_parameters():
        found = by_storage.get(parameter.data_ptr())
        if found is None:
            raise RuntimeError(f"parameter {name} is missing from Megatron's sharded state")
        table[parameter] = [_shard(tensor, start) for tensor, start in found]
    return table


def _sharded_tensors(state: dict) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield each sharded tensor of a state dict, and its start index in the flattened parameter."""
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            yield entry, 0
        elif isinstance(entry, ShardedTensorFactory):
            start = 0
            for part in entry.build():
                yield part, start
                start += part.data.numel()


def _shard(tensor: ShardedTensor, start: int) -> Shard:
    replica = tensor.replica_id
    return Shard(
        name=tensor.key,
        global_shape=tuple(tensor.global_shape),
        offset=tuple(tensor.global_offset),
        shape=tuple(tensor.local_shape),
        start=start,
        # ``replica_id`` is 0 or a tuple of zeros for the copy to save. Ignore a tuple's last entry,
        # the data-parallel rank, because every data-parallel rank saves its ZeRO partition.
        is_primary=replica == 0 or not any(replica[:-1]),
    )
