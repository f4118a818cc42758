"""Which checkpoint a run goes on from, and how its ranks take it over."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed

from diffmegatron.checkpoint.contents import (
    WEIGHT,
    Checkpoint,
    check_same_run,
    open_checkpoint,
    rank_file,
)
from diffmegatron.checkpoint.manifest import read_manifest, verify_contents, verify_files
from diffmegatron.checkpoint.sharded import ShardedReader, pieces_of
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.optim.zero import MOMENTS, ZeroEngine
from diffmegatron.parallel.random import restore_random_states
from diffmegatron.parallel.topology import Topology
from diffmegatron.training.snapshot import ParameterShards, Position

log = logging.getLogger(__name__)


def starting_checkpoint(
    store: CheckpointStore, recipe: Recipe, topology: Topology
) -> Checkpoint | None:
    """The checkpoint to go on from, or None for a new run.

    Raises:
        UserError: there are checkpoints but the recipe does not resume, or is another run's, or
            none of them is good.
    """
    if store.steps() and not recipe.checkpoint.resume:
        raise UserError(
            f"{store.directory} holds checkpoints up to {store.path(store.steps()[-1]).name} and "
            "checkpoint.resume is false; give another run_dir or move them away"
        )
    checkpoint = newest_good(store, topology)
    if checkpoint is not None:
        check_same_run(checkpoint, recipe)
        _check_not_past(checkpoint, recipe)
    return checkpoint


def _check_not_past(checkpoint: Checkpoint, recipe: Recipe) -> None:
    step, steps = int(checkpoint.state["step"]), recipe.training.total_steps
    if step > steps:
        raise UserError(
            f"{checkpoint.directory} is at step {step} and the recipe ends at step {steps}; give "
            f"training.steps of at least {step}, or another run_dir"
        )


def newest_good(
    store: CheckpointStore, topology: Topology, before: int | None = None
) -> Checkpoint | None:
    """The newest checkpoint of which every byte is as it was written, found by all ranks together.

    Each rank reads its share of the files. Damaged ones are reported and the next older is tried.

    Args:
        store: of the run.
        topology: the ranks.
        before: only checkpoints of earlier steps count; None: all.

    Raises:
        UserError: there are checkpoints, and none is good. To begin anew silently would be worse.
    """
    steps = [[step for step in store.steps() if before is None or step < before]]
    distributed.broadcast_object_list(steps, src=0)
    for step in reversed(steps[0]):
        problem = _problem(store.path(step), topology)
        if problem is None:
            return open_checkpoint(store.path(step))
        if topology.is_main:
            log.warning("checkpoint passed over: %s", problem)
    if steps[0] and before is None:
        raise UserError(
            f"none of the {len(steps[0])} checkpoints in {store.directory} is whole; move them "
            "away to begin anew"
        )
    return None


def return_point(store: CheckpointStore, topology: Topology, *, futile: bool) -> Checkpoint | None:
    """The checkpoint that a rollback goes to, found by all ranks together.

    Args:
        store: of the run.
        topology: the ranks.
        futile: no step could be applied since the last rollback. An older checkpoint is taken
            then, if there is one, and the one gone back to keeps its files under a name that no
            start finds.
    """
    newest = newest_good(store, topology)
    if not futile or newest is None:
        return newest
    older = newest_good(store, topology, before=int(newest.state["step"]))
    if older is None:
        return newest
    if topology.is_main:
        left = store.leave(int(newest.state["step"]))
        log.warning("no step could be applied after a checkpoint: it is now %s", left)
    return older


def mixture_change(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """One line where the recipe's ``data.sources`` are not those that the position was saved with.

    Args:
        before: the loader's state in the checkpoint; None: a new run.
        now: the opened loader's.
    """
    if before is None:
        return None
    # The saved one has been through JSON, which knows no tuples.
    period, saved = now["mixture"][-1], before["mixture"][-1]
    if (period["from_sample"], [*period["sources"]]) == (saved["from_sample"], saved["sources"]):
        return None
    listed = ", ".join(f"{source['path']} {source['weight']:g}" for source in period["sources"])
    return f"data.sources changed: from sample {period['from_sample']} on {listed}"


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
    read_fragments(tensors, (WEIGHT, *MOMENTS), engine, shards)
    engine.restore(int(state["updates"]))
    if state["world_size"] == topology.world_size:
        file = rank_file(topology.rank)
        restore_random_states(lambda name: tensors.extra(file, name))
    return Position(int(state["step"]), int(state["updates"]), state["data"], state.get("guard"))


def read_fragments(
    tensors: ShardedReader, kinds: Sequence[str], engine: ZeroEngine, shards: ParameterShards
) -> None:
    """Fill what this rank owns of the optimizer with a checkpoint's tensors of some kinds."""
    for fragment in engine.fragments():
        wanted = {kind: fragment.tensors[kind] for kind in kinds}
        for piece in pieces_of(shards[fragment.parameter], fragment.start, wanted):
            shard = piece.shard
            for kind, values in piece.tensors.items():
                box = tensors.box(kind, shard.name, shard.offset, shard.shape)
                values.copy_(box.view(-1)[piece.start : piece.start + values.numel()])


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
