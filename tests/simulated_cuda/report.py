"""Case functions for steps of `make gpu-report` that are not training runs, and for `preflight`."""

import json
from pathlib import Path
from typing import Any

from diffmegatron.config.schema import Recipe
from diffmegatron.operations.preflight import check_nodes
from tests.simulated_cuda.recorder import Recorder
from tests.simulated_cuda.recording import Case
from tools.benchmarks import layer
from tools.benchmarks.command_line import parse
from tools.benchmarks.gpu_report import REHEARSAL, STEPS, fill_in


def run_layer(recipe: Recipe, _: Case, __: Recorder) -> dict[str, Any]:
    """Run the step "layer" of the report whose folder has the run_dir ``work/NAME``."""
    (step,) = (step for step in STEPS if step.name == "layer")
    ((_, _, _, *arguments),) = fill_in(step, Path(recipe.run_dir).parents[1], REHEARSAL)
    layer.main(parse("layer", arguments))
    return {}


def run_preflight(recipe: Recipe, case: Case, _: Recorder) -> dict[str, Any]:
    """Check this machine as ``preflight`` does, and return the findings of the first rank."""
    folder = Path(recipe.run_dir)
    check_nodes([recipe], folder)
    found: list[dict[str, Any]] = json.loads((folder / "preflight.json").read_text())
    assert len(found) == case.world_size
    return found[0]
