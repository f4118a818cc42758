"""A run at a step, as this rank holds it: into host memory and to disk.

See :mod:`diffmegatron.checkpoint.contents` for the files, :mod:`~diffmegatron.training.resume` for
the way back.
"""

import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from diffmegatron import __version__
from diffmegatron.checkpoint.contents import RECIPE, STATE
from diffmegatron.checkpoint.manifest import FileEntry, Manifest, describe_file, write_manifest
from diffmegatron.checkpoint.sharded import named_tensors, pieces_of
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.load import dump_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.model.shards import Shard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.random import random_states

_LIBRARIES = ("torch", "megatron-core", "deepspeed")

ParameterShards = dict[torch.nn.Parameter, list[Shard]]


@dataclass(frozen=True)
class Position:
    """Where a run stands, the same on every rank.

    Attributes:
        step: steps done, the skipped ones too.
        updates: updates applied, as Adam counts them.
        data: the loader's state; None at the beginning.
        guard: the guard's state; None at the beginning.
    """

    step: int
    updates: int
    data: dict[str, Any] | None
    guard: dict[str, Any] | None


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
                self._buffers[name] = torch.empty_like(values, device="cpu", pin_memory=pinned)
            self._buffers[name].copy_(values, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    @property
    def tensors(self) -> tuple[dict[str, Tensor], str]:
        """What :func:`~diffmegatron.checkpoint.sharded.write_pieces` takes."""
        return self._buffers, self._description


def finish_checkpoint(
    store: CheckpointStore, position: Position, recipe: Recipe, entries: list[FileEntry]
) -> None:
    """On one rank, when all have written: the small files, the manifest, the new name."""
    directory = store.unfinished_path(position.step)
    state = asdict(position) | {
        "world_size": len(entries),
        "versions": {name: version(name) for name in _LIBRARIES}
        | {"diffmegatron": __version__, "python": platform.python_version()},
    }
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n")
    (directory / RECIPE).write_text(dump_recipe(recipe))
    described = [describe_file(directory / name) for name in (STATE, RECIPE)]
    write_manifest(directory, Manifest(position.step, (*entries, *described)))
    store.commit(position.step)
