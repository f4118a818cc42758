"""A run at a step, to disk and back, with all ranks.

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
from torch import distributed

from diffmegatron import __version__
from diffmegatron.checkpoint.contents import RECIPE, STATE, Checkpoint, rank_file
from diffmegatron.checkpoint.manifest import FileEntry, Manifest, describe_file, write_manifest
from diffmegatron.checkpoint.sharded import pieces_of, write_pieces
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.load import dump_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.shards import Shard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.random import random_states, restore_random_states
from diffmegatron.parallel.topology import Topology, fail_together

log = logging.getLogger(__name__)

_LIBRARIES = ("torch", "megatron-core", "deepspeed")

ParameterShards = dict[torch.nn.Parameter, list[Shard]]


@dataclass(frozen=True)
class Position:
    """Where a run stands: updates applied, and the loader's state (None at the beginning)."""

    step: int
    data: dict[str, Any] | None


def save_snapshot(
    store: CheckpointStore,
    position: Position,
    engine: ZeroEngine,
    shards: ParameterShards,
    recipe: Recipe,
    topology: Topology,
) -> Path:
    """Write the checkpoint of a step with all ranks; it counts when this returns.

    Raises:
        UserError: on every rank, when any could not write; nothing half-written counts.
    """
    step = position.step
    _together(store.begin, step, only=topology.is_main)
    try:
        entry = _together(_write_rank_file, store.unfinished_path(step), engine, shards, topology)
        entries: list[Any] = [None] * topology.world_size
        distributed.all_gather_object(entries, entry)
        _together(_finish, store, position, engine, recipe, entries, only=topology.is_main)
    except UserError:
        if topology.is_main:
            store.abandon(step)
        raise
    return store.path(step)


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
    return Position(int(state["step"]), state["data"])


def _write_rank_file(
    directory: Path, engine: ZeroEngine, shards: ParameterShards, topology: Topology
) -> FileEntry:
    pieces = [
        piece
        for fragment in engine.fragments()
        for piece in pieces_of(shards[fragment.parameter], fragment.start, fragment.tensors)
        if piece.shard.is_primary
    ]
    path = directory / rank_file(topology.rank)
    write_pieces(path, pieces, random_states())
    return describe_file(path)


def _finish(
    store: CheckpointStore,
    position: Position,
    engine: ZeroEngine,
    recipe: Recipe,
    entries: list[FileEntry],
) -> None:
    directory = store.unfinished_path(position.step)
    state = asdict(position) | {
        "updates": engine.updates,
        "world_size": len(entries),
        "versions": {name: version(name) for name in _LIBRARIES}
        | {"diffmegatron": __version__, "python": platform.python_version()},
    }
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n")
    (directory / RECIPE).write_text(dump_recipe(recipe))
    described = [describe_file(directory / name) for name in (STATE, RECIPE)]
    write_manifest(directory, Manifest(position.step, (*entries, *described)))
    store.commit(position.step)


def _together(function: Any, *arguments: Any, only: bool = True) -> Any:
    """Call on this rank (if ``only``), and raise everywhere if it failed anywhere."""
    problem, result = None, None
    try:
        result = function(*arguments) if only else None
    except UserError as error:
        problem = str(error)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        log.exception("writing the checkpoint failed")
        problem = f"cannot write the checkpoint: {error}"
    fail_together(problem)
    return result
