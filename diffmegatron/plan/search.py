"""``plan --search``: find the parallel layouts that fit into GPU memory, fastest first."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError
from rich import box
from rich.console import Console
from rich.table import Table

from diffmegatron.config.divisibility import check_ranks
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.hardware import GPUS_PER_NODE
from diffmegatron.model.accounting.memory import peak_memory
from diffmegatron.plan.rank_layout import GIB, USABLE_SHARE, RankLayout, ranks_in_words
from diffmegatron.plan.rates import Hardware, find_hardware, sentences
from diffmegatron.plan.summary import check_recipe_vocabulary
from diffmegatron.plan.tables import duration, print_assumptions
from diffmegatron.plan.timing import TimeEstimate, estimate_time
from diffmegatron.section import divisors
from diffmegatron.validation import validated

# Number of printed layouts.
SHOWN = 10
# Estimated steps that differ by at most this share of the shortest are ties: if the computation has
# assumed rates, which are round numbers, and if its rates are measured.
TIE, MEASURED_TIE = 0.1, 0.03
# Sizes that the search tries. MOST_STAGES limits the pipeline size.
MICRO_BATCHES = (1, 2, 4, 8)
CONTEXTS = (1, 2, 4, 8, 16)
VIRTUAL_STAGES = (1, 2, 4)
MOST_STAGES = 64
# Fewest tokens of a sequence per context-parallel rank that the search tries.
SHORTEST_PART = 2048
# Multiples of the number of GPUs to try if no layout fits.
MULTIPLES = (2, 4, 8, 16, 32)

# Changed values of a recipe, by section and key.
Changes = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A parallel layout with its estimated memory and time.

    Attributes:
        overrides: command-line overrides that set this layout, such as ``parallel.tensor=2``.
        peak: estimated peak memory of the rank that needs most, in bytes.
    """

    overrides: tuple[str, ...]
    layout: RankLayout
    peak: int
    time: TimeEstimate


def search(recipe: Recipe, world_size: int, hardware: str) -> list[Candidate]:
    """Return the layouts that fit into GPU memory, fastest first.

    Only the fastest layout of each combination of tensor, context and pipeline sizes is returned.

    Raises:
        UserError: no layout fits.
    """
    check_ranks(world_size)
    found = find_hardware(hardware)
    check_recipe_vocabulary(recipe)
    available = int(USABLE_SHARE * found.gpu.memory_gib * GIB)
    fitting, nearest = _fitting(recipe, world_size, found, available)
    if not fitting:
        raise UserError(_failure(recipe, world_size, found, available, nearest))
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in sorted(fitting, key=lambda each: (each.time.step, each.peak)):
        layout = candidate.layout
        sizes = (layout.tensor, layout.context, layout.pipeline)
        best.setdefault(sizes, candidate)
    return list(best.values())


def search_to_json(candidates: Sequence[Candidate]) -> str:
    """Return all candidates as a JSON list, fastest first."""
    values = [asdict(each) for each in candidates]
    for value, candidate in zip(values, candidates, strict=True):
        value["time"] |= {"step": candidate.time.step}
    return json.dumps(values, indent=2)


def print_search(
    recipe: Recipe,
    candidates: Sequence[Candidate],
    world_size: int,
    hardware: str,
    console: Console,
) -> None:
    """Print the fastest candidates as a table, their overrides, and the rates."""
    shown, found = candidates[:SHOWN], find_hardware(hardware)
    title = f"{ranks_in_words(world_size)} of {found.name}: {len(candidates)} layouts fit"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ("", "TP", "CP", "PP", "DP", "ZeRO", "redo", "batch", "GiB", "step", "MFU")
    for name in (*columns, "tok/s", "the run"):
        table.add_column(name, justify="right", no_wrap=True)
    ties = number_of_ties(shown)
    for number, candidate in enumerate(shown, 1):
        table.add_row(f"{number}{'=' * (number <= ties > 1)}", *_cells(candidate))
    console.print(table)
    console.print(
        "TP, CP, PP, DP: tensor, context, pipeline and data parallel; PP 4x2: two virtual"
        " stages per rank; redo: recompute; tok/s: tokens per second and GPU; =: a tie, because the"
        f" estimated step is at most {_tie(shown[0]):.0%} above the shortest, with"
        f" {shown[0].time.origins['step']} rates",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    console.print("Overrides to paste:", highlight=False)
    for number, candidate in enumerate(shown, 1):
        line = " ".join(candidate.overrides) or "(the recipe as it is)"
        console.print(f"{number:3d}  {line}", highlight=False, soft_wrap=True)
    print_assumptions(sentences(found.with_backend(recipe), found), console)


def number_of_ties(candidates: Sequence[Candidate]) -> int:
    """Return how many of the fastest candidates have nearly the same estimated step."""
    longest = (1 + _tie(candidates[0])) * candidates[0].time.step
    return sum(each.time.step <= longest for each in candidates)


def _tie(candidate: Candidate) -> float:
    """Return the share by which steps may differ from the shortest one and still tie with it."""
    return MEASURED_TIE if candidate.time.origins["compute"] == "measured" else TIE


def _cells(candidate: Candidate) -> tuple[str, ...]:
    layout, time = candidate.layout, candidate.time
    virtual = f"x{layout.virtual_pipeline}" if layout.virtual_pipeline > 1 else ""
    return (
        str(layout.tensor),
        str(layout.context),
        f"{layout.pipeline}{virtual}",
        str(layout.data),
        str(layout.zero_stage),
        layout.recompute.split(",")[0],
        str(layout.micro_batch_size),
        f"{candidate.peak / GIB:.1f}",
        f"{time.step:.2f} s",
        f"{time.utilization:.0%}",
        f"{time.tokens_per_second / layout.world_size:,.0f}",
        duration(time.days),
    )


def _fitting(
    recipe: Recipe, world_size: int, hardware: Hardware, available: int
) -> tuple[list[Candidate], tuple[int, Recipe] | None]:
    """Return the layouts that fit into ``available`` bytes, and the one that exceeds them least.

    The second value is (peak in bytes, recipe), or None if no layout exceeds ``available``.
    """
    fitting: list[Candidate] = []
    nearest: tuple[int, Recipe] | None = None
    for layout in _layouts(recipe, world_size):
        # Micro-batch sizes increase, so stop at the first that does not fit.
        for changes, valid in _valid(recipe, layout, world_size):
            changed = hardware.with_backend(valid)
            peak = peak_memory(changed, world_size)
            if peak > available:
                if nearest is None or peak < nearest[0]:
                    nearest = (peak, changed)
                break
            time = estimate_time(changed, world_size, hardware)
            overrides = _overrides(recipe, changes)
            fitting.append(Candidate(overrides, RankLayout.of(changed, world_size), peak, time))
    return fitting, nearest


def _valid(recipe: Recipe, layout: Changes, world_size: int) -> Iterator[tuple[Changes, Recipe]]:
    """Yield (changes, recipe) of a layout for each valid micro-batch size, smallest first."""
    merged = {name: getattr(recipe, name) for name in Recipe.model_fields}
    for size in MICRO_BATCHES:
        changes = layout | {"training": {"micro_batch_size": size}}
        for section, keys in changes.items():
            merged[section] = getattr(recipe, section).model_dump() | keys
        try:
            changed = Recipe.model_validate(merged)
            changed.check_ranks(world_size)
        except (ValidationError, UserError):
            continue
        yield changes, changed


def _layouts(recipe: Recipe, world_size: int) -> Iterator[Changes]:
    """Yield the changes of the recipe for each layout to try on ``world_size`` GPUs."""
    layers = recipe.model.num_layers
    # Replace True by None, because True is an error for layouts that cannot overlap gradients.
    overlap = None if recipe.parallel.overlap_gradients else recipe.parallel.overlap_gradients
    for tensor, context, pipeline in _sizes(recipe, world_size):
        for virtual in VIRTUAL_STAGES if pipeline > 1 else (1,):
            if layers % (pipeline * virtual):
                continue
            for zero_stage in (1,) if pipeline > 1 else (1, 2, 3):
                for granularity in ("none", "full"):
                    parallel = {
                        "tensor": tensor,
                        "context": context,
                        "context_communication": "auto",
                        "pipeline": pipeline,
                        "virtual_pipeline": virtual,
                        "sequence_parallel": tensor > 1,
                        "zero_stage": zero_stage,
                        "overlap_gradients": overlap,
                    }
                    recompute = {"granularity": granularity, "method": "uniform", "layers": 1}
                    yield {"parallel": parallel, "recompute": recompute}


def _sizes(recipe: Recipe, world_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield the tensor, context and pipeline sizes to try on ``world_size`` GPUs."""
    layers, length = recipe.model.num_layers, recipe.training.seq_length
    for tensor in range(1, GPUS_PER_NODE + 1):
        if GPUS_PER_NODE % tensor or recipe.model.attention.num_kv_heads % tensor:
            continue
        for context in CONTEXTS:
            if context > 1 and length // context < SHORTEST_PART:
                continue
            if world_size % (tensor * context):
                continue
            for pipeline in divisors(math.gcd(layers, world_size // (tensor * context))):
                if pipeline <= MOST_STAGES:
                    yield tensor, context, pipeline


def _overrides(recipe: Recipe, changes: Changes) -> tuple[str, ...]:
    """Return an override ``section.key=value`` for each change that differs from the recipe."""
    return tuple(
        f"{section}.{key}={'null' if value is None else str(value).lower()}"
        for section, keys in changes.items()
        for key, value in keys.items()
        if getattr(getattr(recipe, section), key) != value
    )


def _failure(
    recipe: Recipe,
    world_size: int,
    hardware: Hardware,
    available: int,
    nearest: tuple[int, Recipe] | None,
) -> str:
    """Return the error message of a search that found no layout that fits."""
    if nearest is None:
        reason = _reason(recipe, world_size)
        return f"no layout fills {ranks_in_words(world_size)} with this recipe: {reason}"
    peak, changed = nearest
    layout = RankLayout.of(changed, world_size)
    sentence = (
        f"no layout of {ranks_in_words(world_size)} fits {USABLE_SHARE:.0%} of {hardware.name}'s "
        f"{hardware.gpu.memory_gib:g} GiB; the nearest, tensor {layout.tensor} x "
        f"context {layout.context} x pipeline {layout.pipeline} with ZeRO {layout.zero_stage} "
        f"and recompute {layout.recompute.split(',')[0]}, lacks {(peak - available) / GIB:.1f} GiB"
    )
    for multiple in MULTIPLES:
        if _fitting(recipe, multiple * world_size, hardware, available)[0]:
            return f"{sentence}; {multiple * world_size} GPUs fit"
    return sentence


def _reason(recipe: Recipe, world_size: int) -> str:
    """Return why no layout is valid: the error of a layout with only data parallelism, if any."""
    plain = {"parallel": {}, "training": recipe.training.model_dump() | {"micro_batch_size": 1}}
    sections = {name: getattr(recipe, name) for name in Recipe.model_fields}
    try:
        validated(Recipe, sections | plain, "with data parallelism alone").check_ranks(world_size)
    except UserError as error:
        return str(error)
    return (
        "the tensor, context and pipeline sizes that its model allows do not divide the number of "
        "ranks"
    )
