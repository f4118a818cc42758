"""The training run: the loop; what else a run does is in its hooks."""

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import check_vocabulary, load_tokenizer
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.parallel.deterministic import deterministic_algorithms
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.agreement import AgreedDecision
from diffmegatron.training.compute.batches import on_this_rank
from diffmegatron.training.compute.step import forward_backward
from diffmegatron.training.document_mask import decide_document_mask
from diffmegatron.training.fault_tolerance.run_lock import refuse_a_file, run_lock
from diffmegatron.training.fault_tolerance.signals import StopRequest
from diffmegatron.training.fault_tolerance.watchdog import Watchdog
from diffmegatron.training.hooks.builtin_hooks import builtin_hooks
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.evaluators import Evaluator
from diffmegatron.training.monitoring.wandb_writer import check_installed
from diffmegatron.training.run import Run


def train(
    recipe: Recipe,
    record: RankRecord | None = None,
    evaluators: Sequence[Evaluator] = (),
    hooks: Sequence[Hook] = (),
    stop: StopRequest | None = None,
) -> bool:
    """Run a recipe on the ranks the launcher started, or on this process alone.

    Writes ``run_dir`` with ``recipe.yaml``, ``metrics.jsonl``, ``tensorboard/``, ``checkpoints/``
    and, if there is cause, ``events/`` and ``stacks/``; goes on from the newest good checkpoint
    there if the recipe says so.

    Args:
        recipe: of the run.
        record: is told every step.
        evaluators: of ``training.evaluate``.
        hooks: the user's, called after the run's own; the same on every rank.
        stop: requests to stop that the caller listens for; None: this run listens for its own.

    Returns:
        Whether the run is finished: its last step is done, and all that is due at it is measured.
        Otherwise it was asked to stop, and has saved.

    Raises:
        UserError: the recipe, the data, the layout or a checkpoint do not fit, wandb is asked for
            and not installed, the guard stopped the run, ``run_dir`` was moved or removed, or the
            last save failed.
    """
    recipe = decide_document_mask(recipe)
    hooks = [*builtin_hooks(recipe, evaluators), *hooks]
    launch, record = read_launch(), record or RankRecord()
    recipe.data_parallel(launch.ranks)
    check_installed(recipe.training.wandb)
    used = load_tokenizer(recipe.data.tokenizer).vocab_size
    check_vocabulary(recipe.data.tokenizer, used, recipe.model.tokens)
    run_dir = Path(recipe.run_dir)
    with suppress(OSError):  # of a path that can be none: the lock says what is wrong with it
        refuse_a_file(run_dir)
    with (
        run_lock(run_dir) if launch.rank == 0 else nullcontext(),
        deterministic_algorithms() if recipe.training.deterministic else nullcontext(),
        StopRequest(record.folder) if stop is None else nullcontext(stop) as stop,
        Watchdog(recipe.watchdog, record.folder or run_dir) as watchdog,
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
        ExitStack() as exits,
    ):
        return run_steps(Run(recipe, parallel_state, stop, watchdog, exits, record), hooks)


def run_steps(run: Run, hooks: Sequence[Hook]) -> bool:
    """Train from the present step to the last one; return whether the run is finished."""
    for hook in hooks:
        hook.before_training(run)
    while not (run.is_at_last_step or run.stopping):
        train_step(run)
        for hook in hooks:
            hook.after_step(run)
    for hook in hooks:
        hook.after_training(run)
    return run.is_finished


def train_step(run: Run) -> None:
    """One global batch: its gradients, the ranks' agreement on them, and its update if allowed."""
    training, optimizer = run.recipe.training, run.recipe.optimizer
    rate = learning_rate(run.step + 1, training.total_steps, optimizer)
    with run.clock("data"):
        microbatches = on_this_rank(next(run.loader), run.parallel_state)
    with run.clock("forward_backward"):
        loss = forward_backward(
            run.engine,
            microbatches,
            run.parallel_state,
            offload_activations=training.offload_activations,
            observe=run.source_losses.add,
        )
    deciding = AgreedDecision(run.guard, lambda norm: run.agree(loss, norm))
    with run.clock("update"):
        run.engine.step(rate, deciding.allow)
    run.stand_at(run.step + 1)
    run.clock.step_done()
    run.watchdog.progress()
    run.agreed, run.decision = deciding.result
    run.source_losses.step_done(finite=run.decision.finite)
    run.unsound = None if run.decision.finite else run.decision.reason
    # After a step that is not finite the run goes on: what it ends with must be sound.
    run.stopping = run.agreed.stop and run.decision.finite
    run.values = {
        "train/loss": run.agreed.loss,
        "train/grad_norm": run.agreed.gradient_norm,
        "train/lr": rate,
        **{f"train/lr/{key}": rate * f for key, f in optimizer.lr_multipliers.items()},
    }
