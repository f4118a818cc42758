"""The YAML file of a study, and the runs that it plans.

An example of a file:

title: Language modelling at 1.8M parameters
recipe: english_small.yaml             # relative to this file
arms:                                  # name in tables, and overrides of the recipe
  softmax: {model.attention.kind: softmax}
  diff_v1: {model.attention.kind: diff_v1}
sizes:                                 # optional: every arm at every size
  small: {model.num_layers: 4}
seeds: [1, 2, 3]
choice: {key: optimizer.lr, grid: [0.001, 0.002, 0.004], seed: 0}
evaluate: [--suite, loss, --data, held_out.jsonl]
baseline: softmax
derived:                               # optional: measures that are computed from others
  answer / noise: {mean: ["needle-attention: answer"], over: ["needle-attention: noise"]}
compared: {test/loss: difference, answer / noise: ratio}
scaling: [parameters, tokens]          # optional: shares of the baseline's at equal loss
along:                                 # optional: measures of reported runs during training
  every: 250                           # steps
  evaluate: [--suite, attention-analysis, --data, held_out.jsonl]
  compared: {"attention-analysis: entropy": difference}
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, model_validator

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_text, shorten
from diffmegatron.section import PathText, Section, Seed, Size
from diffmegatron.yaml_documents import parse_yaml

_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.]{0,63}$")]
_Overrides = dict[str, Any]
_Value = Annotated[float, Field(gt=0)]


class Choice(Section):
    """A key, such as the learning rate, whose best value is chosen for every arm at every size.

    Each value of the grid is tried in a run with ``seed``, which is not a seed of the report. The
    value with the lowest ``valid/loss`` is chosen. If it is the first or last value of the grid,
    the grid is extended at this end until the best value is inside: the two values at this end have
    a ratio, and the new value continues with the same ratio.

    Attributes:
        key: key of the recipe, such as ``optimizer.lr``.
        grid: values to try first, in increasing order.
        seed: ``training.seed`` of the runs that choose.
    """

    key: str
    grid: Annotated[tuple[_Value, ...], Field(min_length=3)]
    seed: Seed

    @model_validator(mode="after")
    def _grid_rises(self) -> Self:
        if sorted(set(self.grid)) != list(self.grid):
            raise ValueError(f"choice.grid is {list(self.grid)}; its values must increase")
        return self


_How = Literal["difference", "ratio"]
Against = Literal["parameters", "tokens"]


class DuringTraining(Section):
    """Measures of reported runs at several steps during training.

    Attributes:
        every: steps between two checkpoints that are kept and evaluated.
        evaluate: arguments of ``diffmegatron evaluate``, without targets and ``--out``.
        compared: for each measure in the report, "difference" or "ratio": how arms are compared
            with the baseline.
    """

    every: Size
    evaluate: Annotated[tuple[str, ...], Field(min_length=1)]
    compared: Annotated[dict[str, _How], Field(min_length=1)]


class Derived(Section):
    """A measure of a run that is computed from other measures of the run.

    Attributes:
        mean: measures whose mean is taken.
        over: measures by whose mean the first mean is divided; empty: no division.
    """

    mean: Annotated[tuple[str, ...], Field(min_length=1)]
    over: tuple[str, ...] = ()


class Study(Section):
    """The content of a study's file.

    Attributes:
        title: heading of the report.
        recipe: path of the recipe that all runs share, relative to the study's file.
        arms: overrides of the recipe for each arm, by the arm's name.
        sizes: overrides of the recipe for each size, by the size's name. They are applied before
            the overrides of the arm. Empty for a study with one size.
        seeds: ``training.seed`` of the reported runs.
        choice: key whose value is chosen per arm and size; None if the recipe has all values.
        evaluate: arguments of ``diffmegatron evaluate`` for reported runs, without target and
            ``--out``.
        baseline: name of the arm that all others are compared with, at equal size and seed.
        derived: additional measures of a run, by name.
        compared: for each measure in the report, "difference" or "ratio": how arms are compared
            with the baseline.
        scaling: quantities of which the report has the share that each arm needs for the loss of
            the baseline, by the power laws of the suite ``scaling``. "parameters" compares the last
            held-out losses of all sizes, and "tokens" the held-out losses during training.
        along: measures during training; None for measures of the final weights alone.
    """

    title: str
    recipe: PathText
    arms: Annotated[dict[_Name, _Overrides], Field(min_length=1)]
    sizes: dict[_Name, _Overrides] = Field(default={})
    seeds: Annotated[tuple[Seed, ...], Field(min_length=1)]
    choice: Choice | None = None
    evaluate: tuple[str, ...] = ()
    baseline: str
    derived: dict[str, Derived] = Field(default={})
    compared: dict[str, _How] = Field(default={"test/loss": "difference"})
    scaling: tuple[Against, ...] = ()
    along: DuringTraining | None = None

    @model_validator(mode="after")
    def _names_fit(self) -> Self:
        if self.baseline not in self.arms:
            raise ValueError(f"baseline is {self.baseline!r}; give one of {', '.join(self.arms)}")
        if self.choice is not None and self.choice.seed in self.seeds:
            raise ValueError(
                f"choice.seed {self.choice.seed} is one of seeds {list(self.seeds)}; choose on a "
                "seed that is not reported"
            )
        if "parameters" in self.scaling and len(self.sizes) < 2:
            raise ValueError(
                f"scaling has 'parameters', and the study has {len(self.sizes)} named sizes; a "
                "power law needs two or more"
            )
        return self

    @property
    def cells(self) -> list["Cell"]:
        """Every arm at every size, ordered by size."""
        return [
            Cell(size, arm, tuple(_written(overrides | own)))
            for size, overrides in (self.sizes or {"": {}}).items()
            for arm, own in self.arms.items()
        ]


@dataclass(frozen=True)
class Cell:
    """An arm at one size.

    Attributes:
        size: name of the size; empty if the study has only one size.
        arm: name of the arm.
        overrides: overrides of the recipe, as KEY=VALUE.
    """

    size: str
    arm: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class PlannedRun:
    """A training run of a study.

    Attributes:
        cell: arm and size of the run.
        seed: ``training.seed``.
        chosen: override, as KEY=VALUE, with a value of ``Study.choice``; empty without a choice.
        is_reported: whether the run is in the report's tables. Other runs only serve the choice of
            a value.
    """

    cell: Cell
    seed: int
    chosen: str
    is_reported: bool

    @property
    def name(self) -> str:
        """Name of the run's folder and of its result line, unique within a study."""
        parts = (self.cell.size, self.cell.arm, self.chosen, f"seed{self.seed}")
        return "-".join(part for part in parts if part)

    @property
    def overrides(self) -> list[str]:
        """Overrides of the recipe for this run, except ``run_dir``."""
        chosen = [self.chosen] if self.chosen else []
        return [*self.cell.overrides, *chosen, f"training.seed={self.seed}"]


def load_study(path: Path) -> Study:
    """Read and check a study's file.

    Raises:
        UserError: If the file cannot be read, or a value is not valid.
    """
    values = parse_yaml(read_text(path), format_path(path))
    try:
        return Study.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        message = str(first.get("ctx", {}).get("error") or first["msg"])
        raise UserError(
            f"{format_path(path)}: {key + ': ' if key else ''}{shorten(message)}"
        ) from None


def wanted_runs(
    study: Study, cells: Sequence[Cell], valid_losses: Mapping[str, float]
) -> list[PlannedRun]:
    """Return all runs that are known so far, including finished ones, in the order to run them.

    The runs that choose a value come first. The reported runs of a cell (an arm at one size) are
    known only after its value is chosen. They are ordered by seed, so that an interrupted study has
    the same seeds for every arm.

    Args:
        study: the study.
        cells: cells to run.
        valid_losses: ``valid/loss`` of the finished runs by name.
    """
    chosen: dict[Cell, str] = {}
    wanted: list[PlannedRun] = []
    for cell in cells:
        if study.choice is None:
            chosen[cell] = ""
            continue
        runs = choice_runs(study.choice, cell, valid_losses)
        wanted += runs
        if (value := chosen_value(runs, valid_losses)) is not None:
            chosen[cell] = value
    return wanted + [
        PlannedRun(cell, seed, chosen[cell], is_reported=True)
        for seed in study.seeds
        for cell in cells
        if cell in chosen
    ]


def choice_runs(choice: Choice, cell: Cell, valid_losses: Mapping[str, float]) -> list[PlannedRun]:
    """Return the runs that choose the value of ``choice.key`` for a cell, by increasing value.

    If all runs of the grid have finished and the best value is the first or last one, the grid is
    extended at this end.

    Args:
        choice: key and grid of values.
        cell: arm and size.
        valid_losses: ``valid/loss`` of the finished runs by name.
    """
    grid = list(choice.grid)
    while True:
        runs = [PlannedRun(cell, choice.seed, f"{choice.key}={v:g}", False) for v in grid]
        if any(run.name not in valid_losses for run in runs):
            return runs
        losses = [valid_losses[run.name] for run in runs]
        best = losses.index(min(losses))
        if best == 0:
            grid.insert(0, grid[0] * grid[0] / grid[1])
        elif best == len(grid) - 1:
            grid.append(grid[-1] * grid[-1] / grid[-2])
        else:
            return runs


def chosen_value(runs: Sequence[PlannedRun], valid_losses: Mapping[str, float]) -> str | None:
    """Return the override of the run with the lowest loss; None if a run has not finished."""
    if any(run.name not in valid_losses for run in runs):
        return None
    return min(runs, key=lambda run: valid_losses[run.name]).chosen


def _written(overrides: Mapping[str, Any]) -> Iterator[str]:
    """Yield overrides as KEY=VALUE.

    Strings of letters, digits, underscores, dots and slashes are written as they are. Other values
    are written as JSON, which is also valid YAML and stays on one line.
    """
    for key, value in overrides.items():
        text = (
            value
            if isinstance(value, str) and re.fullmatch(r"[\w./]+", value)
            else json.dumps(value)
        )
        yield f"{key}={text}"
