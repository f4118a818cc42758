"""Run every recipe of ``configs/`` at its true depth: ``python -m tests.simulated_cuda.recipes``.

Each recipe runs two steps as the first rank. With pipeline parallelism, it also runs as a rank of
the middle stage and as a rank of the last stage. A step has as many microbatches as there are
pipeline stages. The command writes the memory, collectives and kernels of each case, and the counts
of ``diffmegatron plan``, to ``docs/results/simulated_cuda.json``. It prints each component whose
simulated and planned bytes differ by more than :mod:`.comparison` allows. All recipes together need
about ten minutes on one core.

Recipes of DEX, a kind of attention, name a file of selected heads. These files do not exist in the
repository, so this module selects every second head.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diffmegatron.attention.kinds.dex import Dex
from diffmegatron.attention.kinds.selected_heads import SHARE
from diffmegatron.config.load import load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.memory import memory_by_stage
from diffmegatron.plan.traffic import stage_traffic
from tests.paths import CONFIGS, RESULTS, ROOT
from tests.simulated_cuda.comparison import compare, recipe_of
from tests.simulated_cuda.simulate import Case, Recording, SimulationError, try_simulate

JSON = RESULTS / "simulated_cuda.json"
# Number of GPUs for a recipe whose name does not contain a number of GPUs.
GPUS = 64
# Number of cases per process; the results are written after each process.
TOGETHER = 6
FOLDERS = ("at_scale", ".", "scaling", "dex")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulated_cuda.recipes",
        description=f"Simulate every recipe at its true depth; write {JSON.relative_to(ROOT)}.",
    )
    parser.add_argument(
        "--only", default="", help="recipes whose path contains this; other rows stay as they are"
    )
    only = parser.parse_args().only
    rows = json.loads(JSON.read_text())["rows"] if JSON.exists() else []
    cases = [case for path in recipes() if only in str(path) for case in cases_of(path)]
    for begin in range(0, len(cases), TOGETHER):
        some = cases[begin : begin + TOGETHER]
        new = [row(*each) for each in zip(some, try_simulate(some, 7200), strict=True)]
        rows = sorted([*rows, *new], key=_place)
        # If a case has an old row and a new one, the new one comes last and is kept.
        rows = list({_place(each): each for each in rows}.values())
        write(rows)


def _place(row: dict[str, Any]) -> tuple[int, str, int, int]:
    """Return the sort key of a row: position of its folder in ``FOLDERS``, recipe, stage, rank."""
    folder = (ROOT / row["recipe"]).parent
    number = [CONFIGS / each for each in FOLDERS].index(folder)
    return number, row["recipe"], row.get("stage", 0), row.get("rank", 0)


def recipes() -> Iterator[Path]:
    """Yield the paths of the recipes, in the order of ``FOLDERS``."""
    for folder in FOLDERS:
        yield from sorted((CONFIGS / folder).glob("*.yaml"))


def cases_of(path: Path) -> Iterator[Case]:
    """Yield a case for each rank to simulate, for each training stage of a recipe.

    If the recipe does not fit its number of GPUs, the number is halved until the recipe fits.

    Raises:
        UserError: the recipe cannot be read, or does not fit one GPU.
    """
    for number, recipe in enumerate(load_stages(path, allow_missing_files=True)):
        if recipe.training.fp8 is not None:
            continue  # Without Transformer Engine, the step would be in bf16.
        found = re.search(r"_(\d+)gpus", path.name)
        gpus = int(found[1]) if found else GPUS
        while gpus > 1 and not fits(recipe, gpus):
            gpus //= 2
        recipe.num_microbatches(gpus)
        stages = recipe.parallel.pipeline
        for stage in sorted({0, stages // 2, stages - 1}):
            # In Megatron-core the ranks of one pipeline stage are consecutive.
            rank = stage * (gpus // stages)
            yield Case(shown(path), gpus, selected(recipe), rank, microbatches=stages, stage=number)


def selected(recipe: Recipe) -> tuple[str, ...]:
    """Return an override with as many DEX heads as ``dex select`` selects by default.

    The heads are spread evenly, so every tensor-parallel rank has the same number of selected
    heads. For other kinds of attention, the function returns an empty tuple.
    """
    attention = recipe.model.attention.kinds[0]
    if not isinstance(attention, Dex):
        return ()
    heads = list(range(0, attention.num_heads, round(1 / SHARE)))
    return (f"model.attention.selected_heads={[heads] * recipe.model.num_layers}",)


def fits(recipe: Recipe, gpus: int) -> bool:
    try:
        recipe.num_microbatches(gpus)
    except UserError:
        return False
    return True


def row(case: Case, result: Recording | SimulationError) -> dict[str, object]:
    """Return the row of a case, and print its components that differ too much from `plan`."""
    head = {"recipe": case.recipe, "gpus": case.world_size, "rank": case.rank}
    head |= {"stage": case.stage} if case.stage else {}
    if isinstance(result, SimulationError):
        return head | {"error": str(result).rstrip().splitlines()[-1]}
    compared = compare(case, result)
    for component in compared:
        if not component.is_within():
            print(f"{case.recipe} rank {case.rank}: {component}", flush=True)
    step = [each for each in result.collectives if each.phase in ("forward_backward", "update")]
    sent: Counter[str] = Counter()
    for each in step:
        sent[each.group] += round(each.sent)
    return head | {
        "microbatches": case.microbatches,
        "updates_applied": all(result.outcome["applied"]),
        "parameters": result.outcome["parameters"],
        "held": result.held.components,
        "peak": result.peak.total,
        "peak_by_component": result.peak.components,
        "update": result.peaks["update"].total,
        "sent_by_group": {group: size for group, size in sent.items() if size},
        "collectives": sum(each.count for each in step),
        "kernels": sum(
            each.count for each in result.launches if each.phase in ("forward_backward", "update")
        ),
        "waits": result.waits,
        "executed_planned": {each.name: [each.executed, each.planned] for each in compared},
        "outside": {each.name: round(each.error, 4) for each in compared if not each.is_within()},
    }


def planned(row: dict[str, Any]) -> dict[str, object]:
    """Return the counts of `plan` for the case of a row.

    Returns:
        ``peak``: bytes of memory at the peak; ``sent``: bytes that the rank sends in a step, by
        kind of communication (:class:`~diffmegatron.plan.traffic.Traffic`).
    """
    case = Case(
        row["recipe"],
        row["gpus"],
        rank=row["rank"],
        microbatches=row["microbatches"],
        stage=row.get("stage", 0),
    )
    recipe = recipe_of(case)
    stage = case.rank * recipe.parallel.pipeline // case.world_size
    return {
        "peak": memory_by_stage(recipe, case.world_size)[stage].total,
        "sent": asdict(stage_traffic(recipe, case.world_size, stage)),
    }


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def write(rows: list[dict[str, Any]]) -> None:
    """Write all rows to :data:`JSON`, each on one line.

    ``waits`` counts the waits of both steps. The other numbers are of the second step only. The
    function updates the counts of `plan` in every row of ``configs/at_scale/`` without an error,
    also in rows of earlier runs.
    """
    rows = [
        each | {"planned": planned(each)}
        if "peak" in each and "/at_scale/" in each["recipe"]
        else each
        for each in rows
    ]
    versions = {name: version(name) for name in ("torch", "megatron-core", "deepspeed")}
    lines = ",\n ".join(json.dumps(each) for each in rows)
    JSON.write_text(f'{{"versions": {json.dumps(versions)}, "rows": [\n {lines}\n]}}\n')


if __name__ == "__main__":
    main()
