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
    """Train the stages of a recipe one after the other; skip the stages that are finished.

    If there is only one stage, it is never skipped: :func:`train` handles a finished run.

    Args:
        record: writer of the files that the job script reads: the progress of the run (heartbeat),
            and how this rank ended.
        hooks: user-defined hooks, the same instances in every stage.

    Returns:
        True if all stages are finished; False if the training stopped before, because of a stop
        signal, the job's time limit or a hook.

    Raises:
        UserError: As in :func:`~diffmegatron.training.trainer.train`. Also, before any stage runs,
            if the number of ranks does not fit the layout of a stage, or if a stage uses wandb and
            wandb is not installed.
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
        # All stages share one StopRequest, so that a signal that arrives after the last step of a
        # stage still prevents the following stages.
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
    """Return, on every rank, whether at least one rank must stop before the next stage begins.

    A rank must stop if it has received a stop signal; rank 0 also if the job soon reaches its time
    limit.
    """
    pending: list[bool] = [False] * distributed.get_world_size()
    is_pending = stop.is_pending(following.checkpoint.time_limit_margin)
    distributed.all_gather_object(pending, is_pending)
    if any(pending) and distributed.get_rank() == 0:
        name = Path(following.run_dir).name
        print_line(f"stop requested before stage {name}; the same command resumes with it")
    return any(pending)


def _unfinished(recipes: Sequence[Recipe], names: Sequence[str]) -> list[Recipe]:
    """Return the recipes of the stages that are not finished, and print the finished stages.

    Only rank 0 reads the run directories (:func:`_is_finished`) and prints.
    """
    finished = from_rank_0(lambda: [_is_finished(recipe) for recipe in recipes])
    for recipe, name, is_finished in zip(recipes, names, finished, strict=True):
        if is_finished and distributed.get_rank() == 0:
            print_line(f"{name}: finished at step {recipe.training.total_steps}")
    return [recipe for recipe, done in zip(recipes, finished, strict=True) if not done]


def _is_finished(recipe: Recipe) -> bool:
    """Return whether a stage has the checkpoint and all evaluations of its last step.

    If ``checkpoint.resume`` is false, the result is False. The stage is then passed to
    :func:`train`, which refuses to start in a ``run_dir`` that has checkpoints.

    Raises:
        UserError: If the checkpoint of the last step exists, and the recipe in this checkpoint
            differs from ``recipe`` in a part that must stay equal, such as the network.
    """
    run_dir, steps = Path(recipe.run_dir), recipe.training.total_steps
    newest = CheckpointStore(run_dir).latest()
    if newest is None or read_manifest(newest).step != steps:
        return False
    check_same_run(newest, read_recipe(newest), recipe)
    return recipe.checkpoint.resume and not unrecorded_at(recipe, steps, run_dir)
