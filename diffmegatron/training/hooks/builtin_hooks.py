"""The hooks that every run has, in the order in which they are called."""

from collections.abc import Sequence

from diffmegatron.config.schema import Recipe
from diffmegatron.training.hooks.evaluation_hook import EvaluationHook
from diffmegatron.training.hooks.guard_hook import GuardHook
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.hooks.metrics_hook import MetricsHook
from diffmegatron.training.hooks.profile_hook import ProfileHook
from diffmegatron.training.hooks.save_hooks import BeginSaveHook, FinishSaveHook
from diffmegatron.training.monitoring.evaluators import Evaluator, split_losses


def builtin_hooks(recipe: Recipe, evaluators: Sequence[Evaluator]) -> list[Hook]:
    """What a recipe asks for beside its steps.

    The order matters: a save that a sound step has confirmed counts before the guard may go back
    to it, what is recorded and measured is of the step that the guard has left the run at, and a
    save begins after the evaluation of its weights.

    Args:
        recipe: of the run.
        evaluators: of ``training.evaluate``.
    """
    assert len(evaluators) == len(recipe.training.evaluate), "training.evaluate is not open"
    profile = recipe.training.profile
    return [
        FinishSaveHook(),
        GuardHook(),
        MetricsHook(),
        EvaluationHook([*split_losses(recipe), *evaluators]),
        BeginSaveHook(),
        *([] if profile is None else [ProfileHook(profile)]),
    ]
