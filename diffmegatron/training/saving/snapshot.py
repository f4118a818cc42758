"""Copy of this rank's weights, optimizer and random states in host memory, for a checkpoint."""

import torch
from torch import Tensor

from diffmegatron.checkpoint.sharded import named_tensors, pieces_of
from diffmegatron.model.parameter_shards import Shard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.random import random_states

ParameterShards = dict[torch.nn.Parameter, list[Shard]]


class HostCopy:
    """Copy of this rank's tensors in host buffers, which all saves of a run share.

    New buffers for every save would cost more time than the copy, because the operating system must
    map each page and CUDA must pin it.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._description = ""

    def take(self, engine: ZeroEngine, shards: ParameterShards) -> None:
        """Copy all tensors that this rank saves; wait until the copy is finished."""
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
                # Checkpoints store float32; frozen weights may have another dtype, such as bf16.
                dtype = torch.float32 if values.is_floating_point() else values.dtype
                self._buffers[name] = torch.empty_like(
                    values, dtype=dtype, device="cpu", pin_memory=pinned
                )
            self._buffers[name].copy_(values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @property
    def tensors(self) -> tuple[dict[str, Tensor], str]:
        """The host tensors by name, and a JSON text with the place of each in its parameter."""
        return self._buffers, self._description
