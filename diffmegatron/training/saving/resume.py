"""Which checkpoint a run goes on from, and how its ranks take it over."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import distributed

from diffmegatron.checkpoint.checkpoint_format import (
    WEIGHT,
    Checkpoint,
    Position,
    check_same_run,
    open_checkpoint,
    rank_file,
)
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.sharded import ShardedReader, pieces_of
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import shown
from diffmegatron.optim.zero import MOMENTS, ZeroEngine
from diffmegatron.parallel.parallel_state import ParallelState, fail_together
from diffmegatron.parallel.random import restore_random_states
from diffmegatron.training.saving.snapshot import ParameterShards

log = logging.getLogger(__name__)


def starting_checkpoint(
    store: CheckpointStore, recipe: Recipe, parallel_state: ParallelState
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
    checkpoint = newest_good(store, parallel_state)
    if checkpoint is not None:
        _check_goes_on(checkpoint)
        check_same_run(checkpoint.directory, checkpoint.recipe, recipe)
        _check_not_past(checkpoint, recipe)
    return checkpoint


def _check_goes_on(checkpoint: Checkpoint) -> None:
    if checkpoint.is_weights_only:
        raise UserError(
            f"{checkpoint.directory} has weights and no optimizer state, so no run goes on from "
            "it; name it as checkpoint.start_from, and give another run_dir"
        )


def _check_not_past(checkpoint: Checkpoint, recipe: Recipe) -> None:
    step, steps = checkpoint.state["step"], recipe.training.total_steps
    if step > steps:
        raise UserError(
            f"{checkpoint.directory} is at step {step} and the recipe ends at step {steps}; give "
            f"training.steps of at least {step}, or another run_dir"
        )


def open_together(directory: Path, parallel_state: ParallelState) -> Checkpoint:
    """Open a checkpoint on all ranks, each of which verifies its share of the files.

    Raises:
        UserError: on every rank, the first problem that any of them has with it.
    """
    problem = None
    try:
        checkpoint = open_checkpoint(directory, (parallel_state.rank, parallel_state.world_size))
    except UserError as error:
        problem = str(error)
    fail_together(problem)
    return checkpoint


def newest_good(
    store: CheckpointStore, parallel_state: ParallelState, before: int | None = None
) -> Checkpoint | None:
    """The newest checkpoint of which every byte is as it was written, found by all ranks together.

    Damaged ones are reported and the next older is tried.

    Args:
        store: of the run.
        parallel_state: the ranks.
        before: only checkpoints of earlier steps count; None: all.

    Raises:
        UserError: there are checkpoints, and none is good. To start over silently would be worse.
    """
    steps = [step for step in _steps(store, parallel_state) if before is None or step < before]
    for step in reversed(steps):
        try:
            return open_together(store.path(step), parallel_state)
        except UserError as error:
            if parallel_state.is_main:
                log.warning("checkpoint passed over: %s", error)
    if steps and before is None:
        raise UserError(
            f"none of the {len(steps)} checkpoints in {shown(store.directory)} is whole; put back "
            "one that is, or move them away to start over"
        )
    return None


def _steps(store: CheckpointStore, parallel_state: ParallelState) -> list[int]:
    """Those that rank 0 sees, on every rank."""
    steps: list[list[int]] = [[]]
    problem = None
    try:
        if parallel_state.is_main:
            steps = [store.steps()]
    except UserError as error:
        problem = str(error)
    fail_together(problem)
    distributed.broadcast_object_list(steps, src=0)
    return steps[0]


def return_point(
    store: CheckpointStore, parallel_state: ParallelState, *, no_progress: bool
) -> Checkpoint | None:
    """The checkpoint that a rollback goes to, found by all ranks together.

    Args:
        store: of the run.
        parallel_state: the ranks.
        no_progress: no step could be applied since the last rollback. An older checkpoint is taken
            then, if there is one, and the one rolled back to keeps its files under a name that no
            start finds.
    """
    newest = newest_good(store, parallel_state)
    if not no_progress or newest is None:
        return newest
    older = newest_good(store, parallel_state, before=newest.state["step"])
    if older is None:
        return newest
    if parallel_state.is_main:
        left = store.leave(newest.state["step"])
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
    checkpoint: Checkpoint,
    engine: ZeroEngine,
    shards: ParameterShards,
    parallel_state: ParallelState,
) -> Position:
    """Restore weights, optimizer and random states from a checkpoint of any layout.

    Returns:
        Position: where the run is.

    Raises:
        UserError: the checkpoint is damaged or of another model.
    """
    state, tensors = checkpoint.state, checkpoint.tensors
    read_fragments(tensors, (WEIGHT, *MOMENTS), engine, shards)
    engine.restore(state["updates"])
    if state["world_size"] == parallel_state.world_size:
        file = rank_file(parallel_state.rank)
        seeded = restore_random_states(lambda name: tensors.extra(file, name))
        if seeded and parallel_state.is_main:
            log.warning(
                "the checkpoint was written on another kind of device: the random states %s start "
                "from training.seed; weights, optimizer and the order of the data are its own",
                ", ".join(seeded),
            )
    return Position(state["step"], state["updates"], state["data"], state["guard"])


def read_fragments(
    tensors: ShardedReader,
    kinds: Sequence[str],
    engine: ZeroEngine,
    shards: ParameterShards,
    is_left: Callable[[str], bool] = lambda name: False,
) -> None:
    """Fill what this rank owns of the optimizer and the weights with a checkpoint's tensors.

    Args:
        tensors: of the checkpoint.
        kinds: which of every tensor; of one that is frozen, the weight alone.
        engine: the optimizer.
        shards: of its parameters.
        is_left: says of a tensor, by its name, that it stays as it is.
    """
    for fragment in engine.fragments():
        wanted = {kind: fragment.tensors[kind] for kind in kinds if kind in fragment.tensors}
        for piece in pieces_of(shards[fragment.parameter], fragment.start, wanted):
            shard = piece.shard
            if is_left(shard.name):
                continue
            for kind, values in piece.tensors.items():
                box = tensors.box(kind, shard.name, shard.offset, shard.shape)
                values.copy_(box.view(-1)[piece.start : piece.start + values.numel()])
