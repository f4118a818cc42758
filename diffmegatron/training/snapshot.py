"""A run at a step, as this rank holds it: into host memory, to disk, and back.

See :mod:`diffmegatron.checkpoint.contents` for the files. The random states are taken over where
the number of ranks is the same.
"""

import json
import logging
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron import __version__
from diffmegatron.checkpoint.contents import RECIPE, STATE, Checkpoint, open_checkpoint, rank_file
from diffmegatron.checkpoint.manifest import (
    FileEntry,
    Manifest,
    describe_file,
    read_manifest,
    verify_contents,
    verify_files,
    write_manifest,
)
from diffmegatron.checkpoint.sharded import named_tensors, pieces_of
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.load import dump_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.shards import Shard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.random import random_states, restore_random_states
from diffmegatron.parallel.topology import Topology

log = logging.getLogger(__name__)

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


def newest_good(store: CheckpointStore, topology: Topology) -> Checkpoint | None:
    """The newest checkpoint of which every byte is as it was written, found by all ranks together.

    Each rank reads its share of the files. Damaged ones are reported and the next older is tried.

    Raises:
        UserError: there are checkpoints, and none is good. To begin anew silently would be worse.
    """
    steps = [store.steps()]
    distributed.broadcast_object_list(steps, src=0)
    for step in reversed(steps[0]):
        problem = _problem(store.path(step), topology)
        if problem is None:
            return open_checkpoint(store.path(step))
        if topology.is_main:
            log.warning("checkpoint passed over: %s", problem)
    if steps[0]:
        raise UserError(
            f"none of the {len(steps[0])} checkpoints in {store.directory} is whole; move them "
            "away to begin anew"
        )
    return None


def load_snapshot(
    checkpoint: Checkpoint, engine: ZeroEngine, shards: ParameterShards, topology: Topology
) -> Position:
    """Restore weights, optimizer and random states from a checkpoint of any layout.

    Returns:
        Position: where the run stands.

    Raises:
        UserError: the checkpoint is damaged or of another model.
    """
    state, tensors = checkpoint.state, checkpoint.tensors
    for fragment in engine.fragments():
        for piece in pieces_of(shards[fragment.parameter], fragment.start, fragment.tensors):
            shard = piece.shard
            for kind, values in piece.tensors.items():
                box = tensors.box(kind, shard.name, shard.offset, shard.shape)
                values.copy_(box.view(-1)[piece.start : piece.start + values.numel()])
    engine.restore(int(state["updates"]))
    if state["world_size"] == topology.world_size:
        file = rank_file(topology.rank)
        restore_random_states(lambda name: tensors.extra(file, name))
    return Position(int(state["step"]), int(state["updates"]), state["data"], state.get("guard"))


def _problem(directory: Path, topology: Topology) -> str | None:
    """The first rank's problem with a checkpoint, each having read its share; None: it is good."""
    problem = None
    try:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        verify_contents(directory, manifest.files[topology.rank :: topology.world_size])
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * topology.world_size
    distributed.all_gather_object(problems, problem)
    return next((each for each in problems if each is not None), None)
