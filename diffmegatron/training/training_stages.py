"""Training of a recipe with several stages; each stage is a run with its own ``run_dir``."""

from collections.abc import Sequence
from pathlib import Path

from torch import distributed

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_format import check_same_run, read_recipe
from diffmegatron.checkpoint.checkpoint_manifest import read_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import from_rank_0
from diffmegatron.training.fault_tolerance.safeguards import StopRequest
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.due import unrecorded_at
from diffmegatron.training.monitoring.evaluators import OpenEvaluators
from diffmegatron.training.monitoring.progress import print_line
from diffmegatron.training.monitoring.wandb_writer import check_installed
from diffmegatron.training.trainer import train


def train_stages(
    recipes: Sequence[Recipe],
    record: RankRecord | None = None,
    open_evaluators: OpenEvaluators | None = None,
    hooks: Sequence[Hook] = (),
) -> bool:
    """Train the stages of a recipe one after the other; return whether all are finished.

    Finished stages are skipped, but not a single stage: :func:`train` handles a finished run.
    Arguments are like those of :func:`train`; ``hooks`` are the same instances in every stage.
    """
    launch = read_launch()
    for recipe in recipes:
        recipe.data_parallel(launch.ranks)
        check_installed(recipe.training.wandb)
    names = [
        f"stage {number} of {len(recipes)}, {Path(recipe.run_dir).name}"
        for number, recipe in enumerate(recipes, start=1)
    ]
    with default_group():
        unfinished = _unfinished(recipes, names) if len(recipes) > 1 else list(recipes)
        evaluators = [open_evaluators(recipe) if open_evaluators else () for recipe in unfinished]
        if record is not None and not unfinished:
            record.set_step(recipes[-1].training.total_steps, recipes[-1].run_dir)
        # Share one StopRequest, so that a signal after a stage's last step stops the next stages.
        with StopRequest(launch, record.folder if record else None) as stop:
            for recipe, each in zip(unfinished, evaluators, strict=True):
                if recipe is not unfinished[0] and _should_stop(stop, recipe):
                    return False
                if len(recipes) > 1 and distributed.get_rank() == 0:
                    print_line(
                        f"{names[recipes.index(recipe)]}: {recipe.training.total_steps} steps"
                    )
                if not train(recipe, record, each, hooks, stop):
                    return False
    return True


def _should_stop(stop: StopRequest, following: Recipe) -> bool:
    """Return, on every rank, whether at least one rank must stop before the next stage begins."""
    pending: list[bool] = [False] * distributed.get_world_size()
    is_pending = stop.is_pending(following.checkpoint.time_limit_margin)
    distributed.all_gather_object(pending, is_pending)
    if any(pending) and distributed.get_rank() == 0:
        name = Path(following.run_dir).name
        print_line(f"stop requested before stage {name}; the same command resumes with it")
    return any(pending)


def _unfinished(recipes: Sequence[Recipe], names: Sequence[str]) -> list[Recipe]:
    """Return the recipes of the stages that are not finished, and print the finished stages."""
    finished = from_rank_0(lambda: [_is_finished(recipe) for recipe in recipes])
    for recipe, name, is_finished in zip(recipes, names, finished, strict=True):
        if is_finished and distributed.get_rank() == 0:
            print_line(f"{name}: finished at step {recipe.training.total_steps}")
    return [recipe for recipe, done in zip(recipes, finished, strict=True) if not done]


def _is_finished(recipe: Recipe) -> bool:
    """Return whether a stage has the checkpoint and all evaluations of its last step."""
    run_dir, steps = Path(recipe.run_dir), recipe.training.total_steps
    newest = CheckpointStore(run_dir).latest()
    if newest is None or read_manifest(newest).step != steps:
        return False
    check_same_run(newest, read_recipe(newest), recipe)
    return recipe.checkpoint.resume and not unrecorded_at(recipe, steps, run_dir)
