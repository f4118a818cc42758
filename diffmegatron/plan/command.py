"""The command ``diffmegatron plan``: print plans of a recipe, or search for parallel layouts.

A stage in this module is a training stage, one of the runs that a recipe defines.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diffmegatron.checkpoint.stage_folders import earlier_recipes, source_recipe
from diffmegatron.config.recipe_changes import changes_in_words, unscaled_extension
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import STAGES
from diffmegatron.plan.search import Candidate, print_search, search, search_to_json
from diffmegatron.plan.summary import DEFAULT_HARDWARE, Plan, plan_recipe
from diffmegatron.plan.tables import print_plan


def run_plan(
    stages: Sequence[Recipe],
    world_size: int | None = None,
    *,
    hardware: str = DEFAULT_HARDWARE,
    as_json: bool = False,
) -> None:
    """Print the plan of each stage of a recipe, as tables or as JSON (a list for several stages).

    ``world_size`` is the number of ranks; None for the fewest that fit the layouts of all stages.
    """
    ranks = math.lcm(*(recipe.parallel.model_ranks for recipe in stages))
    given = ranks if world_size is None else world_size
    plans = [_plan(recipe, stages, given, hardware) for recipe in stages]
    if as_json:
        _print_json([plan.to_json() for plan in plans])
        return
    console = Console()
    previous: Plan | None = None
    for recipe, plan in zip(stages, plans, strict=True):
        _print_heading(stages, plan.run_dir, console)
        before = source_recipe(recipe, stages)
        if before is not None and (changes := changes_in_words(before, recipe)):
            console.print(Text(changes), soft_wrap=True)
        print_plan(plan, console, previous)
        previous = plan


def _plan(recipe: Recipe, stages: Sequence[Recipe], world_size: int, hardware: str) -> Plan:
    """Return the plan of a stage, with the warnings that depend on the stages before it."""
    plan = plan_recipe(recipe, world_size, hardware)
    warning = unscaled_extension(earlier_recipes(recipe, stages), recipe)
    return plan if warning is None else replace(plan, warnings=(*plan.warnings, warning))


def run_search(
    stages: Sequence[Recipe],
    world_size: int,
    *,
    hardware: str = DEFAULT_HARDWARE,
    as_json: bool = False,
) -> None:
    """Print, for each stage, the layouts that fit into the memory of the GPUs, fastest first."""
    found = [search(recipe, world_size, hardware) for recipe in stages]
    if len(stages) > 1:
        found = [
            [_in_stage(recipe, each) for each in candidates]
            for recipe, candidates in zip(stages, found, strict=True)
        ]
    if as_json:
        _print_json([search_to_json(candidates) for candidates in found])
        return
    console = Console()
    for recipe, candidates in zip(stages, found, strict=True):
        _print_heading(stages, recipe.run_dir, console)
        print_search(recipe, candidates, world_size, hardware, console)


def _in_stage(recipe: Recipe, candidate: Candidate) -> Candidate:
    """Return the candidate with overrides that change only the stage of ``recipe``."""
    prefix = f"{STAGES}{Path(recipe.run_dir).name}."
    return replace(candidate, overrides=tuple(f"{prefix}{each}" for each in candidate.overrides))


def _print_heading(stages: Sequence[Recipe], run_dir: str, console: Console) -> None:
    if len(stages) > 1:
        console.rule(Text(run_dir))


def _print_json(texts: Sequence[str]) -> None:
    print(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
