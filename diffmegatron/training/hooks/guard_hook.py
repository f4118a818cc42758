"""What the guard's decision on a step leads to: a dump, a rollback, the end of the run."""

from pathlib import Path
from typing import NoReturn

from diffmegatron.optim.guard import Action, StepDecision
from diffmegatron.training.fault_tolerance.events import stopped_by_guard, write_event
from diffmegatron.training.fault_tolerance.largest_logits import largest_logits
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.observations import lambdas
from diffmegatron.training.run import Run
from diffmegatron.training.saving.resume import return_point


class GuardHook(Hook):
    """Dumps each step out of order, and goes back or gives up where the guard says so."""

    def __init__(self) -> None:
        # Of the checkpoint that the last rollback went to: as many now, and it was of no use.
        self._updates_returned_to: int | None = None

    def after_step(self, run: Run) -> None:
        """See :class:`Hook`."""
        if run.decision.reason is not None:
            _dump(run)
        if run.decision.action is Action.STOP:
            give_up(run, run.decision)
        if run.decision.action is Action.ROLL_BACK:
            self._roll_back(run)

    def _roll_back(self, run: Run) -> None:
        """Go back to the newest good checkpoint, and on with the data that comes now.

        So the batches since the checkpoint, the offending ones among them, are passed over.
        """
        with run.pause():
            run.close_save()
            run.saver.wait()
            no_progress = run.engine.updates == self._updates_returned_to
            checkpoint = return_point(run.store, run.parallel_state, no_progress=no_progress)
            if checkpoint is None:
                give_up(run, run.decision)
            position = run.resume(checkpoint)
            assert position.guard is not None
            run.guard.rolled_back(position.guard)
            run.stand_at(position.step)
            run.saver.saved_step = position.step
            self._updates_returned_to = position.updates
        run.rewind_metrics()


def give_up(run: Run, decision: StepDecision) -> NoReturn:
    """End the run without saving.

    Raises:
        UserError: always.
    """
    run.close_save()
    newest = run.store.latest()
    raise stopped_by_guard(run.recipe, run.step, decision, run.guard, newest)


def _dump(run: Run) -> None:
    last_sample = run.loader.consumed_samples - 1
    event = {
        "loss": run.agreed.loss,
        "gradient_norm": run.agreed.gradient_norm,
        "first_sample": last_sample + 1 - run.recipe.training.global_batch_size,
        "last_sample": last_sample,
        "lambda": lambdas(run.network, run.parallel_state),
    }
    norms, logits = run.engine.held_gradient_norms(), _largest_logits(run)
    write_event(
        Path(run.recipe.run_dir),
        run.step,
        run.decision,
        event,
        norms,
        logits,
        run.shards,
        run.parallel_state,
    )


def _largest_logits(run: Run) -> dict[int, float]:
    """Of the last batch, with the present weights: after the update if it was applied."""
    if run.parallel_state.context_size > 1:
        return {}  # a rank's queries meet the other ranks' keys inside the kernels only
    with run.pause():
        return largest_logits(run.network, lambda: run.forward(run.last_batch()))
