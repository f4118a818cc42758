"""The stages of a recipe, one run after the other."""

from collections.abc import Sequence

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.config.schema import Recipe
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.evaluators import OpenEvaluators
from diffmegatron.training.trainer import train


def train_stages(
    recipes: Sequence[Recipe],
    record: RankRecord | None = None,
    open_evaluators: OpenEvaluators | None = None,
    hooks: Sequence[Hook] = (),
) -> bool:
    """Run the stages of a recipe one after the other; a finished one has nothing left to do.

    Args:
        recipes: of the stages.
        record: is told every step.
        open_evaluators: gives what ``training.evaluate`` asks for.
        hooks: the user's, the same ones in every stage.

    Returns:
        Whether all are finished.

    Raises:
        UserError: as :func:`train`; before any stage where the ranks do not fit one of them.
    """
    ranks = read_launch().ranks
    for recipe in recipes:
        recipe.data_parallel(ranks)
    evaluators = [open_evaluators(recipe) if open_evaluators else () for recipe in recipes]
    with default_group():
        return all(
            train(recipe, record, each, hooks)
            for recipe, each in zip(recipes, evaluators, strict=True)
        )
