"""The stages of a recipe, one run after the other."""

from collections.abc import Sequence
from pathlib import Path

from torch import distributed

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_format import check_same_run, read_recipe
from diffmegatron.checkpoint.checkpoint_manifest import read_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import fail_together
from diffmegatron.training.fault_tolerance.signals import StopRequest
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.due import unrecorded_at
from diffmegatron.training.monitoring.evaluators import OpenEvaluators
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.monitoring.wandb_writer import check_installed
from diffmegatron.training.trainer import train


def train_stages(
    recipes: Sequence[Recipe],
    record: RankRecord | None = None,
    open_evaluators: OpenEvaluators | None = None,
    hooks: Sequence[Hook] = (),
) -> bool:
    """Run the stages of a recipe one after the other; a finished one is passed over.

    Args:
        recipes: of the stages.
        record: is told every step.
        open_evaluators: gives what ``training.evaluate`` asks for.
        hooks: the user's, the same ones in every stage.

    Returns:
        Whether all are finished.

    Raises:
        UserError: as :func:`train`; before any stage where the ranks do not fit one of them,
            or one asks for wandb and it is not installed.
    """
    ranks = read_launch().ranks
    for recipe in recipes:
        recipe.data_parallel(ranks)
        check_installed(recipe.training.wandb)
    names = [
        f"stage {number} of {len(recipes)}, {Path(recipe.run_dir).name}"
        for number, recipe in enumerate(recipes, start=1)
    ]
    with default_group():
        is_left = _are_left(recipes, names) if len(recipes) > 1 else [True]
        left = [each for each, is_one in zip(recipes, is_left, strict=True) if is_one]
        evaluators = [open_evaluators(recipe) if open_evaluators else () for recipe in left]
        if record is not None and not left:
            record.at(recipes[-1].training.total_steps, recipes[-1].run_dir)
        # One for all stages: a signal that comes when a stage is done holds for those after it.
        with StopRequest(record.folder if record else None) as stop:
            for recipe, each in zip(left, evaluators, strict=True):
                if recipe is not left[0] and _is_asked_to_stop(stop, recipe):
                    return False
                if len(recipes) > 1 and distributed.get_rank() == 0:
                    say(f"{names[recipes.index(recipe)]}: {recipe.training.total_steps} steps")
                if not train(recipe, record, each, hooks, stop):
                    return False
    return True


def _is_asked_to_stop(stop: StopRequest, following: Recipe) -> bool:
    """Return whether any rank received a stop signal, on every rank; rank 0 says so."""
    asked: list[bool] = [False] * distributed.get_world_size()
    is_pending = stop.is_pending(following.checkpoint.time_limit_margin)
    distributed.all_gather_object(asked, is_pending)
    if any(asked) and distributed.get_rank() == 0:
        name = Path(following.run_dir).name
        say(f"asked to stop before stage {name}; the same command goes on with it")
    return any(asked)


def _are_left(recipes: Sequence[Recipe], names: Sequence[str]) -> list[bool]:
    """Which stages are not finished, on every rank; rank 0 reads that and says which are.

    Raises:
        UserError: a finished one is of another recipe.
    """
    found, problem = [[True] * len(recipes)], None
    if distributed.get_rank() == 0:
        try:
            found = [[not _is_finished(recipe) for recipe in recipes]]
        except UserError as error:
            problem = str(error)
    fail_together(problem)
    distributed.broadcast_object_list(found, src=0)
    for recipe, name, is_left in zip(recipes, names, found[0], strict=True):
        if not is_left and distributed.get_rank() == 0:
            say(f"{name}: finished at step {recipe.training.total_steps}")
    return found[0]


def _is_finished(recipe: Recipe) -> bool:
    """By the newest whole checkpoint, of which the small files alone are read, and the metrics."""
    run_dir, steps = Path(recipe.run_dir), recipe.training.total_steps
    newest = CheckpointStore(run_dir).latest()
    if newest is None or read_manifest(newest).step != steps:
        return False
    check_same_run(newest, read_recipe(newest), recipe)
    return recipe.checkpoint.resume and not unrecorded_at(recipe, steps, run_dir)
