"""When a run saves, and when a save that was begun counts."""

import math

from diffmegatron.optim.guard import Action, StepDecision
from diffmegatron.training.hooks.guard_hook import give_up
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.run import Run


class FinishSaveHook(Hook):
    """Makes the save that is under way count as soon as it may."""

    def after_step(self, run: Run) -> None:
        """See :class:`Hook`."""
        run.saver.step_decided(finite=run.decision.finite)
        if run.saver.is_ready and not run.agreed.writing:
            run.close_save()


class BeginSaveHook(Hook):
    """Saves every ``checkpoint.interval`` steps, again after a failure, and at the end."""

    def after_step(self, run: Run) -> None:
        """Begin to save, and wait for the writing if the recipe does not save asynchronously."""
        checkpoint = run.recipe.checkpoint
        if run.step % checkpoint.interval and not run.saver.is_due_again:
            return
        with run.pause():
            run.close_save()
            run.write_metrics(run.saver.start(run.position()))
            if not checkpoint.asynchronous:
                run.saver.wait()

    def after_training(self, run: Run) -> None:
        """Save the last step unless it is saved, and wait until that counts."""
        # An evaluation that was made after a restart can find what was saved to be unsound.
        if run.saver.saved_step != run.step or run.unsound is not None:
            self._save_now(run)
        run.saver.wait()
        if run.stopping and not run.is_finished and run.parallel_state.is_main:
            first = f", first with {', '.join(run.unmeasured)}" if run.unmeasured else ""
            say(f"asked to stop: saved step {run.step}; the same command goes on from there{first}")

    def _save_now(self, run: Run) -> None:
        with run.pause():
            _check_sound(run)
            run.saver.step_decided(finite=True)
            run.close_save()
            if run.saver.saved_step != run.step:
                run.write_metrics(run.saver.save_now(run.position()))


def _check_sound(run: Run) -> None:
    """Refuse to end with weights that the last update has wrecked: no later step would tell."""
    if run.unsound is None and not math.isfinite(run.forward(run.last_batch()).loss):
        run.unsound = "loss of the last batch after its update is not finite"
    if run.unsound is not None:
        give_up(run, StepDecision(False, Action.STOP, run.unsound, finite=False))
