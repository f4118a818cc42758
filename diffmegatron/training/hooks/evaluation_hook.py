"""The held-out losses and the suites of ``training.evaluate``, at the steps where they are due."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.due import HELD_OUT, TEST, due_at, unrecorded_at
from diffmegatron.training.monitoring.evaluators import Evaluator, measure
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.run import Run

_SAID = {HELD_OUT: "held-out loss", TEST: "test loss"}


class EvaluationHook(Hook):
    """Measures the network before the first step, every so many steps and after the last one.

    A run that received a stop signal before an evaluation or during it resumes at that step, and
    measures what is not recorded of it before anything else.

    Args:
        evaluators: all that may be due at a step.
    """

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        self._evaluators = evaluators

    def before_training(self, run: Run) -> None:
        """See :class:`Hook`."""
        missing: list[Any] = [None]
        if run.parallel_state.is_main:  # which alone writes and reads what is recorded
            missing = [unrecorded_at(run.recipe, run.step, Path(run.recipe.run_dir))]
        distributed.broadcast_object_list(missing, src=0)
        self._evaluate(run, missing[0])

    def after_step(self, run: Run) -> None:
        """See :class:`Hook`."""
        self._evaluate(run, due_at(run.recipe, run.step))

    def _evaluate(self, run: Run, names: Collection[str]) -> None:
        due = {each.name: each for each in self._evaluators if each.name in names}
        run.unmeasured = tuple(due)
        if not due or run.stopping:
            return
        with run.pause():
            found = measure(due.values(), run.network, run.parallel_state, lambda: _goes_on(run))
        run.unmeasured = tuple(name for name in due if name not in found)
        values = {name: value for each in found.values() for name, value in each.items()}
        run.write_metrics(values)
        for name, said in _SAID.items():
            if name in values and run.parallel_state.is_main:
                say(f"{said} {values[name]:.4f} at step {run.step}")
            if not math.isfinite(values.get(name, 0.0)):
                run.unsound = f"{said} is {values[name]}"


def _goes_on(run: Run) -> bool:
    """Whether nobody was asked to stop, after a part of an evaluation."""
    agreed = run.agree(torch.zeros((), device=run.parallel_state.device))
    run.stopping = agreed.stop and run.unsound is None
    run.watchdog.progress()
    run.rank_record.at(run.step, run.recipe.run_dir)
    return not run.stopping
