"""The command ``diffmegatron plan``: print plans of a recipe, or search for parallel layouts.

A stage in this module is a training stage, one of the runs that a recipe defines.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import STAGES, changes_of_network
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
    plans = [plan_recipe(recipe, given, hardware) for recipe in stages]
    if as_json:
        _print_json([plan.to_json() for plan in plans])
        return
    console = Console()
    previous: Plan | None = None
    for recipe, plan in zip(stages, plans, strict=True):
        _print_heading(stages, plan.run_dir, console)
        if before := _stage_before(recipe, stages):
            _print_changes(before, recipe, console)
        print_plan(plan, console, previous)
        previous = plan


def _stage_before(recipe: Recipe, stages: Sequence[Recipe]) -> Recipe | None:
    """Return the stage whose weights ``recipe`` starts with, or None."""
    start = recipe.checkpoint.start_from
    return next((stage for stage in stages if stage.run_dir == start), None)


def _print_changes(before: Recipe, now: Recipe, console: Console) -> None:
    """Print how the network and the sequence length change between two stages."""
    changes = changes_of_network(before, now)
    lengths = (before.training.seq_length, now.training.seq_length)
    if lengths[0] != lengths[1]:
        changes.append(f"training.seq_length {lengths[0]} -> {lengths[1]}")
    if changes:
        console.print(Text(f"changes of {before.run_dir}: {', '.join(changes)}"), soft_wrap=True)


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
