"""What the command line calls."""

from collections.abc import Sequence

from rich.console import Console

from diffmegatron.config.schema import Recipe
from diffmegatron.plan.summary import DEFAULT_HARDWARE, plan_recipe
from diffmegatron.plan.tables import print_plan


def run(
    stages: Sequence[Recipe],
    world_size: int | None = None,
    *,
    hardware: str = DEFAULT_HARDWARE,
    as_json: bool = False,
) -> None:
    """Plan the stages of a recipe and print them to standard output, as tables or as JSON.

    JSON is one object, or of several stages a list of them, told apart by ``run_dir``.
    """
    plans = [plan_recipe(recipe, world_size, hardware) for recipe in stages]
    if as_json:
        texts = [plan.to_json() for plan in plans]
        print(texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]")
        return
    console = Console()
    for plan in plans:
        if len(stages) > 1:
            console.rule(plan.run_dir)
        print_plan(plan, console)
