"""What a person needs to see of a step that was out of order: which layer, rank and data."""

import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import distributed

from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.topology import Topology
from diffmegatron.training.snapshot import ParameterShards

EVENTS = "events"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def dump_event(
    run_dir: Path,
    step: int,
    event: Mapping[str, Any],
    engine: ZeroEngine,
    shards: ParameterShards,
    topology: Topology,
) -> None:
    """Write ``run_dir/events/step_XXXXXXXX.json`` with all ranks; rank 0 writes.

    Args:
        run_dir: of the run.
        step: the step out of order, from 1.
        event: what is known of it on every rank.
        engine: asked for each rank's gradient norms (see ``held_gradient_norms``).
        shards: the names of its parameters.
        topology: the ranks.
    """
    norms = {
        shards[parameter][0].name: norm for parameter, norm in engine.held_gradient_norms().items()
    }
    mine = {
        "rank": topology.rank,
        "gradient_norm_by_layer": _by_layer(norms),
        "not_finite": [name for name, norm in norms.items() if not math.isfinite(norm)],
    }
    ranks: list[Any] = [None] * topology.world_size
    distributed.all_gather_object(ranks, mine)
    if not topology.is_main:
        return
    directory = run_dir / EVENTS
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step_{step:08d}.json"
    attempt = 1
    while path.exists():  # a run that was rolled back comes by the same step again
        attempt += 1
        path = directory / f"step_{step:08d}_{attempt}.json"
    content = {"step": step, "time": round(time.time(), 3), **event, "ranks": ranks}
    path.write_text(json.dumps(_json_numbers(content), indent=1) + "\n")


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Norm over each layer's gradients, layers from 1, the tensors outside of any by name."""
    squares: dict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        layer = _LAYER.match(name)
        squares[f"layer_{int(layer[1]) + 1:02d}" if layer else name] += norm**2
    return {name: math.sqrt(square) for name, square in squares.items()}


def _json_numbers(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_json_numbers(each) for each in value]
    return value
