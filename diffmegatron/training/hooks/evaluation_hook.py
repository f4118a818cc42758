"""The held-out loss and the suites of ``training.evaluate``, where they are due."""

import math
from collections.abc import Sequence

import torch

from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.evaluators import HELD_OUT, TEST, Evaluator, measure
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.run import Run


class EvaluationHook(Hook):
    """Measures the network before the first step, every so many steps and after the last one.

    Args:
        evaluators: asked at each of these.
        at_the_end: asked after the last step alone.
    """

    def __init__(
        self, evaluators: Sequence[Evaluator], at_the_end: Sequence[Evaluator] = ()
    ) -> None:
        self._evaluators, self._at_the_end = evaluators, at_the_end

    def before_training(self, run: Run) -> None:
        """See :class:`Hook`."""
        if run.step == 0:
            self._evaluate(run, self._evaluators)

    def after_step(self, run: Run) -> None:
        """See :class:`Hook`."""
        if run.is_finished:
            self._evaluate(run, [*self._evaluators, *self._at_the_end])
        else:
            self._evaluate(run, [each for each in self._evaluators if run.step % each.every == 0])

    def _evaluate(self, run: Run, due: Sequence[Evaluator]) -> None:
        if not due or run.stopping:
            return
        with run.pause():
            values = measure(due, run.network, run.parallel_state, lambda: _goes_on(run))
        run.write_metrics(values)
        if TEST in values and run.parallel_state.is_main:
            say(f"test loss {values[TEST]:.4f} at step {run.step}")
        if HELD_OUT in values:
            if run.parallel_state.is_main:
                say(f"held-out loss {values[HELD_OUT]:.4f} at step {run.step}")
            if not math.isfinite(values[HELD_OUT]):
                run.unsound = f"held-out loss is {values[HELD_OUT]}"


def _goes_on(run: Run) -> bool:
    """Whether nobody was asked to stop, after a part of an evaluation."""
    agreed = run.agree(torch.zeros((), device=run.parallel_state.device))
    run.stopping = agreed.stop and run.unsound is None
    run.watchdog.progress()
    run.rank_record.at(run.step, run.recipe.run_dir)
    return not run.stopping
