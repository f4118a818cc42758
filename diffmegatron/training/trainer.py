"""Training of a recipe's stages, and the training loop of one run.

A stage of a recipe is trained as a separate run. After each step, hooks save checkpoints, record
metrics, evaluate and roll back.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path

from torch import Tensor, distributed

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_format import check_same_run, read_recipe
from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.config.width_scaling import matrix_rate
from diffmegatron.data.index import corpus_manifest
from diffmegatron.data.tokenizers import check_vocabulary, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import format_path
from diffmegatron.hf.kinds import export_problem
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.deterministic import deterministic_algorithms
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import from_rank_0, process_groups
from diffmegatron.training.builtin_hooks import builtin_hooks
from diffmegatron.training.compute.batches import on_this_rank
from diffmegatron.training.compute.step import forward_backward
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.attention_logits import observed_logits
from diffmegatron.training.monitoring.due import unrecorded_at
from diffmegatron.training.monitoring.evaluators import Evaluator, OpenEvaluators
from diffmegatron.training.monitoring.progress import print_line
from diffmegatron.training.monitoring.wandb_writer import check_installed
from diffmegatron.training.run import Run
from diffmegatron.training.safeguards import StopRequest, Watchdog, run_lock


def train_stages(
    recipes: Sequence[Recipe],
    record: RankRecord | None = None,
    open_evaluators: OpenEvaluators | None = None,
    hooks: Sequence[Hook] = (),
) -> bool:
    """Train the stages of a recipe one after the other; return whether all are finished.

    ``recipes`` has one recipe per stage. If there are several, finished stages are skipped.
    ``open_evaluators`` returns the evaluators of a stage. ``record`` and ``hooks`` are arguments of
    :func:`train`.
    """
    launch = read_launch()
    for recipe in recipes:
        recipe.check_ranks(launch.ranks)
        check_installed(recipe.training.wandb)
    with default_group():
        unfinished = _unfinished(recipes) if len(recipes) > 1 else list(recipes)
        evaluators = [open_evaluators(recipe) if open_evaluators else () for recipe in unfinished]
        if record is not None and not unfinished:
            record.set_step(recipes[-1].training.total_steps, recipes[-1].run_dir)
        if not unfinished and launch.rank == 0:
            print_line(f"all {len(recipes)} stages have finished; nothing is left to do")
        # Use one StopRequest for all stages, so that a signal after a stage's last step also
        # prevents the next stages.
        with StopRequest(launch, record.folder if record else None) as stop:
            for recipe, each in zip(unfinished, evaluators, strict=True):
                if recipe is not unfinished[0] and _should_stop(stop, recipe):
                    return False
                if len(recipes) > 1:
                    _print_stage(recipes, recipe, f"{recipe.training.total_steps} steps")
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


def _print_stage(recipes: Sequence[Recipe], recipe: Recipe, state: str) -> None:
    if distributed.get_rank() == 0:
        number, name = recipes.index(recipe) + 1, Path(recipe.run_dir).name
        print_line(f"stage {number} of {len(recipes)}, {name}: {state}")


def _unfinished(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Return the recipes of the stages that are not finished, and print the finished stages."""
    finished = from_rank_0(lambda: [_is_finished(recipe) for recipe in recipes])
    unfinished = []
    for recipe, is_finished in zip(recipes, finished, strict=True):
        if is_finished:
            _print_stage(recipes, recipe, f"finished at step {recipe.training.total_steps}")
        else:
            unfinished.append(recipe)
    return unfinished


def _is_finished(recipe: Recipe) -> bool:
    """Return whether a stage has the checkpoint and all evaluations of its last step.

    If ``checkpoint.resume`` is false, return False, so that :func:`train` reports the existing
    checkpoints as an error.
    """
    run_dir, steps = Path(recipe.run_dir), recipe.training.total_steps
    newest = CheckpointStore(run_dir).latest()
    if newest is None or read_checkpoint_manifest(newest).step != steps:
        return False
    check_same_run(newest, read_recipe(newest), recipe)
    return recipe.checkpoint.resume and not unrecorded_at(recipe, steps, run_dir)


def train(
    recipe: Recipe,
    record: RankRecord | None = None,
    evaluators: Sequence[Evaluator] = (),
    hooks: Sequence[Hook] = (),
    stop: StopRequest | None = None,
) -> bool:
    """Train a recipe on all ranks that the launcher started; return whether the run is finished.

    The run resumes from the newest intact checkpoint in ``run_dir``. A run that stops early
    (because of a signal, the job's time limit or a hook) saves first.

    Args:
        recipe: recipe that fits the number of ranks.
        record: writer of this rank's last step and exit status; None to write nothing.
        evaluators: one evaluator per entry of ``training.evaluate``.
        hooks: user-defined hooks, called after the built-in hooks; the same on every rank.
        stop: handler of stop signals that the caller has already entered; None to create one.
    """
    launch, record = read_launch(), record or RankRecord()
    recipe = decide_document_mask(recipe, prints=launch.rank == 0)
    hooks = [*builtin_hooks(recipe, evaluators), *hooks]
    used = load_tokenizer(recipe.data.tokenizer).vocab_size
    check_vocabulary(recipe.data.tokenizer, used, recipe.model.tokens)
    problem = export_problem(
        recipe.model.attention,
        recipe.model.hidden_size,
        recipe.model.num_layers,
        from_scratch=recipe.checkpoint.start_from is None,
    )
    if problem is not None and launch.rank == 0:
        print_line(f"warning: {problem}")
    run_dir = Path(recipe.run_dir)
    with suppress(OSError):  # If run_dir is not accessible, run_lock reports it.
        if run_dir.exists() and not run_dir.is_dir():
            raise UserError(
                f"run_dir {format_path(run_dir)} is a file; give a directory, or a path that is "
                "free"
            )
    with (
        run_lock(run_dir) if launch.rank == 0 else nullcontext(),
        deterministic_algorithms() if recipe.training.deterministic else nullcontext(),
        StopRequest(launch, record.folder) if stop is None else nullcontext(stop) as stop,
        Watchdog(recipe.watchdog, record.folder or run_dir, launch.rank) as watchdog,
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
        ExitStack() as exits,
    ):
        run = Run(recipe, parallel_state, launch, stop, watchdog, exits, record)
        for hook in hooks:
            hook.before_training(run)
        if run.is_finished and launch.rank == 0:
            print_line(
                f"{format_path(run_dir)} has finished at step {run.step} of {run.step}; nothing is "
                "left to do"
            )
        while not (run.is_at_last_step or run.stopping):
            train_step(run)
            for hook in hooks:
                hook.after_step(run)
        for hook in hooks:
            hook.after_training(run)
        return run.is_finished


def train_step(run: Run) -> None:
    """Train on one global batch: compute gradients; update the weights if the guard allows it."""
    training, optimizer = run.recipe.training, run.recipe.optimizer
    rate = learning_rate(run.step + 1, training.total_steps, optimizer)
    with run.clock("data"):
        microbatches = on_this_rank(next(run.loader), run.parallel_state)
    observed: AbstractContextManager[dict[int, Tensor]] = nullcontext({})
    if run.are_next_logits_observed:
        observed = observed_logits(run.network, once=True)
    with run.clock("forward_backward"), observed as run.largest_logits:
        loss = forward_backward(
            run.engine,
            microbatches,
            run.parallel_state,
            offload_activations=training.offload_activations,
            observe=run.source_losses.add,
        )

    def should_apply(gradient_norm: Tensor) -> bool:
        run.agreed = run.agree(loss, gradient_norm)
        run.decision = run.guard.decide(run.agreed.loss, run.agreed.gradient_norm)
        return run.decision.applied

    with run.clock("update"):
        run.engine.step(rate, should_apply)
    run.set_step(run.step + 1)
    run.clock.step_done()
    run.watchdog.restart_timer()
    run.source_losses.step_done(finite=run.decision.finite)
    run.broken_reason = None if run.decision.finite else run.decision.reason
    # A stop after a step that is not finite would end the run with an error, so do not stop then.
    run.stopping = run.agreed.stop and run.decision.finite
    run.values = {"train/loss_tokens": run.agreed.loss_tokens}
    if run.agreed.loss is not None:
        run.values |= {
            "train/loss": run.agreed.loss,
            "train/grad_norm": run.agreed.gradient_norm,
        }
        if training.z_loss:
            run.values["train/z_loss"] = run.agreed.z_loss
    run.values |= logged_rates(rate, run.recipe)


def logged_rates(rate: float, recipe: Recipe) -> dict[str, float]:
    """Return the learning rates of a step as metrics; the schedule gives ``rate``."""
    optimizer, factor = recipe.optimizer, matrix_rate(recipe)
    rates = {"train/lr": rate}
    if optimizer.kind == "muon":
        rates["train/lr_muon"] = rate * optimizer.muon_lr_factor * factor
    elif recipe.model.initialization.scheme == "mup":
        rates["train/lr_matrices"] = rate * factor
    by_pattern = {
        f"{name}/{pattern}": value * multiplier
        for name, value in rates.items()
        for pattern, multiplier in optimizer.lr_multipliers.items()
    }
    return rates | by_pattern


def decide_document_mask(recipe: Recipe, *, prints: bool = True) -> Recipe:
    """Return the recipe with a document mask, and print a line if conversations decide it."""
    decided = corpus_manifest.with_document_mask(recipe, allow_missing=False)
    if prints and decided is not recipe and decided.data.reset_attention_mask:
        conversations = corpus_manifest.packed_conversations(recipe.data)
        print_line(
            f"attention stays within a document, because {', '.join(conversations)} has "
            "conversations that share sequences; set data.reset_attention_mask=false to let "
            "conversations attend to each other"
        )
    return decided
