"""Checkpoints that a run loads: to resume, to roll back, or to start from another run's weights."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffmegatron.attention.kinds import LayerKinds
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
from diffmegatron.checkpoint.stage_folders import is_run_dir, last_stage
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import check_can_start_from
from diffmegatron.config.trainable_patterns import is_lora
from diffmegatron.errors import UserError
from diffmegatron.files import format_path
from diffmegatron.model.network import declared_parameter
from diffmegatron.model.parameter_shards import ParameterShards
from diffmegatron.optim.adamw import MOMENTS
from diffmegatron.optim.schedule import decay_start, learning_rate
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import ParallelState, errors_on_all_ranks, from_rank_0
from diffmegatron.parallel.random import restore_random_states

log = logging.getLogger(__name__)


def starting_checkpoint(
    store: CheckpointStore, recipe: Recipe, parallel_state: ParallelState
) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None for a new run; all ranks must call this."""
    if store.steps() and not recipe.checkpoint.resume:
        raise UserError(
            f"{store.directory} holds checkpoints up to {store.path(store.steps()[-1]).name} and "
            "checkpoint.resume is false; give another run_dir or move them away"
        )
    checkpoint = newest_good(store, parallel_state)
    if checkpoint is None:
        return None
    if checkpoint.is_weights_only:
        raise UserError(
            f"{checkpoint.directory} has weights and no optimizer state, so no run can resume from "
            "it; set checkpoint.start_from to it, and give another run_dir"
        )
    check_same_run(checkpoint.directory, checkpoint.recipe, recipe)
    step, steps = checkpoint.state["step"], recipe.training.total_steps
    if step > steps:
        raise UserError(
            f"{checkpoint.directory} is at step {step} and the recipe ends at step {steps}; give "
            f"training.steps of at least {step}, or another run_dir"
        )
    warnings = (
        learning_rate_rise(checkpoint.recipe, recipe, step),
        lost_moments(checkpoint.recipe, recipe),
        lost_scales(recipe),
    )
    for warning in warnings:
        if warning is not None and parallel_state.is_main:
            log.warning("%s", warning)
    return checkpoint


def lost_moments(before: Recipe, now: Recipe) -> str | None:
    """Return a warning if a run of AdamW resumes with Muon."""
    if (before.optimizer.kind, now.optimizer.kind) != ("adamw", "muon"):
        return None
    return (
        "the run was trained by AdamW and resumes with Muon: the first moments of the layers' "
        "matrices become Muon's momentum, and their second moments are lost"
    )


def lost_scales(now: Recipe) -> str | None:
    """Return a warning if a resumed run has delayed scaling of FP8."""
    if now.training.fp8 is None or now.training.fp8.recipe != "delayed":
        return None
    return (
        "checkpoints do not have the scales of training.fp8.recipe 'delayed': they begin at 1, and "
        "the first microbatch loses small gradients in FP8"
    )


def learning_rate_rise(before: Recipe, now: Recipe, step: int) -> str | None:
    """Return a warning if a run resumes with a higher learning rate than it had decayed to.

    Args:
        before: recipe of the checkpoint.
        now: recipe of the resumed run, whose schedule or number of steps may differ.
        step: step of the checkpoint.
    """
    was, optimizer = before.training.total_steps, before.optimizer
    start = decay_start(was, optimizer)
    if step <= start or step == now.training.total_steps:
        return None
    old_rate = learning_rate(step, was, optimizer)
    new_rate = learning_rate(step + 1, now.training.total_steps, now.optimizer)
    if new_rate <= old_rate and {optimizer.kind, now.optimizer.kind} == {"muon"}:
        old_rate *= optimizer.muon_lr_factor
        new_rate *= now.optimizer.muon_lr_factor
    if new_rate <= old_rate:
        return None
    remedy = (
        f"resume from a checkpoint of step {start} or earlier"
        if start > 0
        else "start a new run with all its steps"
    )
    return (
        f"the learning rate rises from {old_rate:.3g} at step {step} to {new_rate:.3g} at step "
        f"{step + 1}, because the decay of the {was}-step run had begun after step {start}; to "
        f"extend the run without its decay, {remedy}"
    )


def open_together(directory: Path, parallel_state: ParallelState) -> Checkpoint:
    """Open a checkpoint on all ranks together; each rank verifies some of the files."""
    with errors_on_all_ranks():
        return open_checkpoint(directory, (parallel_state.rank, parallel_state.world_size))


def newest_good(
    store: CheckpointStore, parallel_state: ParallelState, before: int | None = None
) -> Checkpoint | None:
    """Return the newest intact checkpoint; all ranks must call this.

    If there is no checkpoint, return None. If all checkpoints are damaged, raise UserError, because
    a run must not silently start over. With ``before``, only checkpoints of earlier steps are
    tried, and the result is None if none of them is intact.
    """
    # Only rank 0 lists the directory, because the ranks could find different checkpoints.
    steps = [step for step in from_rank_0(store.steps) if before is None or step < before]
    for step in reversed(steps):
        try:
            return open_together(store.path(step), parallel_state)
        except UserError as error:
            if parallel_state.is_main:
                log.warning("skipped a damaged checkpoint: %s", error)
    if steps and before is None:
        raise UserError(
            f"none of the {len(steps)} checkpoints in {format_path(store.directory)} is intact; "
            "restore one, or move them away to start over"
        )
    return None


def rollback_checkpoint(
    store: CheckpointStore, parallel_state: ParallelState, *, no_progress: bool
) -> Checkpoint | None:
    """Return the checkpoint to roll back to, or None if there is none; all ranks must call this.

    Usually it is the newest intact checkpoint. ``no_progress`` means that no step was applied since
    the last rollback. In this case, if an older intact checkpoint exists, rename the newest one and
    return the older one.
    """
    newest = newest_good(store, parallel_state)
    if not no_progress or newest is None:
        return newest
    older = newest_good(store, parallel_state, before=newest.state["step"])
    if older is None:
        return newest
    if parallel_state.is_main:
        left = store.set_aside(newest.state["step"])
        log.warning("no step could be applied after a checkpoint: it is now %s", left)
    return older


def open_start(recipe: Recipe, parallel_state: ParallelState) -> Checkpoint | None:
    """Open the checkpoint of ``checkpoint.start_from``, or return None if this setting is None.

    If the setting is a ``run_dir``, the newest intact checkpoint of its last stage is opened. All
    ranks must call this function.
    """
    if recipe.checkpoint.start_from is None:
        return None
    start = Path(recipe.checkpoint.start_from)
    path = from_rank_0(lambda: last_stage(start).run_dir if is_run_dir(start) else start)
    source = newest_good(CheckpointStore(path), parallel_state) or open_together(
        path, parallel_state
    )
    check_can_start_from(source.recipe, str(source.directory), recipe, "the recipe")
    _check_made_for(source, recipe.model.attention)
    return source


def _check_made_for(source: Checkpoint, attention: LayerKinds) -> None:
    """Check that DEX's heads in ``model.attention`` were selected on the weights of ``source``.

    If ``source`` is a DEX checkpoint itself, nothing is checked.
    """
    foundation = attention.foundation
    made_for = None if foundation is None else foundation.fingerprint
    if made_for is None or source.recipe.model.attention.kind == attention.kind:
        return
    if (found := source.fingerprint()) != made_for:
        raise UserError(
            f"model.attention was made for weights of fingerprint {made_for} and "
            f"{format_path(source.directory)} has {found}; select the heads on the model that the "
            "run starts with"
        )


def mixture_change(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str | None:
    """Return one line about a change of ``data.sources`` between two loader states, or None."""
    if before is None:
        return None
    # Compare the last periods. A period has the sources and weights that are used from sample
    # ``from_sample`` on. JSON has turned the saved tuple of sources into a list.
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
    """Restore weights, optimizer and random states from a checkpoint of any parallel layout.

    Random states are restored only if the checkpoint was written by the same number of ranks.
    Megatron's random states also need the same kind of device (GPU or CPU).
    """
    state, tensors = checkpoint.state, checkpoint.tensors
    read_fragments(tensors, (WEIGHT, *MOMENTS), engine, shards)
    engine.restore(state["updates"])
    if state["world_size"] == parallel_state.world_size:
        file = rank_file(parallel_state.rank)
        not_restored = restore_random_states(lambda name: tensors.read_rank_tensor(file, name))
        if not_restored and parallel_state.is_main:
            log.warning(
                "the checkpoint was written on another kind of device: the random states %s start "
                "from training.seed; weights, optimizer and data order are restored",
                ", ".join(not_restored),
            )
    return Position(state["step"], state["updates"], state["data"], state["guard"])


def load_weights(
    source: Checkpoint, recipe: Recipe, engine: ZeroEngine, shards: ParameterShards
) -> None:
    """Load only the weights of a checkpoint.

    LoRA matrices and parameters of the kind of attention keep their initial values if the
    checkpoint's network lacks them.
    """

    def is_new(name: str) -> bool:
        if is_lora(name):
            return source.recipe.model.lora is None
        was, now = (declared_parameter(name, each.model) for each in (source.recipe, recipe))
        return now is not None and was is None

    read_fragments(source.tensors, (WEIGHT,), engine, shards, is_new)
    engine.restore(updates=0)


def read_fragments(
    tensors: ShardedReader,
    kinds: Sequence[str],
    engine: ZeroEngine,
    shards: ParameterShards,
    should_skip: Callable[[str], bool] = lambda name: False,
) -> None:
    """Copy values of a checkpoint into this rank's master weights and moments, in place.

    The caller must call ``engine.restore`` afterwards, which applies the new values to the network.

    Args:
        kinds: some of "weight", "exp_avg" and "exp_avg_sq", of which a parameter may lack the last.
        should_skip: function of a tensor's name; if it returns True, the tensor is not changed.
    """
    for fragment in engine.fragments():
        wanted = {kind: fragment.tensors[kind] for kind in kinds if kind in fragment.tensors}
        for piece in pieces_of(shards[fragment.parameter], fragment.start, wanted):
            shard = piece.shard
            if should_skip(shard.name):
                continue
            for kind, values in piece.tensors.items():
                box = tensors.read_box(kind, shard.name, shard.offset, shard.shape)
                values.copy_(box.view(-1)[piece.start : piece.start + values.numel()])
