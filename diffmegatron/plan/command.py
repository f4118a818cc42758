"""The command ``diffmegatron plan``: print plans of a recipe, or search for parallel layouts.

A plan lists parameters, FLOPs, memory, traffic between ranks and time of a run. It is computed from
the recipe without training. A stage in this module is a training stage, one of the runs that a
recipe defines; it is not a pipeline stage.
"""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import rotary_changes
from diffmegatron.plan.search import print_search, search, search_to_json
from diffmegatron.plan.summary import DEFAULT_HARDWARE, Plan, plan_recipe
from diffmegatron.plan.tables import print_plan


def run(
    stages: Sequence[Recipe],
    world_size: int | None = None,
    *,
    hardware: str = DEFAULT_HARDWARE,
    as_json: bool = False,
) -> None:
    """Print the plan of each stage of a recipe to standard output, as tables or as JSON.

    The JSON is one object, or with several stages a list of one object per stage.

    Args:
        world_size: number of ranks, which is the same for all stages; None for the smallest number
            that fits the layouts of all stages.
        hardware: name of a GPU in ``diffmegatron.model.accounting.ACCELERATORS``.

    Raises:
        UserError: If the number of ranks does not fit a stage, or the hardware is unknown.
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
    """Return the stage whose weights ``recipe`` starts with.

    Return None if ``recipe`` starts with new weights, or with weights from outside ``stages``.
    """
    start = recipe.checkpoint.start_from
    return next((stage for stage in stages if stage.run_dir == start), None)


def _print_changes(before: Recipe, now: Recipe, console: Console) -> None:
    """Print how rotary embedding and sequence length change between two stages."""
    changes = rotary_changes(before, now)
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
    """Print, for each stage, the layouts that fit into the memory of the GPUs, fastest first.

    Args:
        hardware: name of a GPU in ``diffmegatron.model.accounting.ACCELERATORS``.

    Raises:
        UserError: If no layout fits a stage, or the hardware is unknown.
    """
    found = [search(recipe, world_size, hardware) for recipe in stages]
    if as_json:
        _print_json([search_to_json(candidates) for candidates in found])
        return
    console = Console()
    for recipe, candidates in zip(stages, found, strict=True):
        _print_heading(stages, recipe.run_dir, console)
        print_search(recipe, candidates, world_size, hardware, console)


def _print_heading(stages: Sequence[Recipe], run_dir: str, console: Console) -> None:
    if len(stages) > 1:
        console.rule(Text(run_dir))


def _print_json(texts: Sequence[str]) -> None:
    print(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
