"""A run at a step, as this rank holds it, into host memory.

See :mod:`diffmegatron.checkpoint.checkpoint_format` for the files,
:mod:`~diffmegatron.training.saving.resume` for the way back.
"""

import torch
from torch import Tensor

from diffmegatron.checkpoint.sharded import named_tensors, pieces_of
from diffmegatron.model.parameter_shards import Shard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.random import random_states

ParameterShards = dict[torch.nn.Parameter, list[Shard]]


class HostCopy:
    """This rank's tensors in host memory, in buffers that serve one save after the other.

    New memory for every save would cost more than the copy: each page is faulted in, and pinned
    where there is a GPU.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._description = ""

    def take(self, engine: ZeroEngine, shards: ParameterShards) -> None:
        """Copy what this rank saves; training may go on when this returns."""
        pieces = [
            piece
            for fragment in engine.fragments()
            for piece in pieces_of(shards[fragment.parameter], fragment.start, fragment.tensors)
            if piece.shard.is_primary
        ]
        tensors, self._description = named_tensors(pieces, random_states())
        for name, values in tensors.items():
            if name not in self._buffers:
                pinned = values.device.type == "cuda"
                # Frozen weights come in the network's dtype.
                dtype = torch.float32 if values.is_floating_point() else values.dtype
                self._buffers[name] = torch.empty_like(
                    values, dtype=dtype, device="cpu", pin_memory=pinned
                )
            self._buffers[name].copy_(values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @property
    def tensors(self) -> tuple[dict[str, Tensor], str]:
        """What :func:`~diffmegatron.checkpoint.sharded.write_pieces` takes."""
        return self._buffers, self._description
