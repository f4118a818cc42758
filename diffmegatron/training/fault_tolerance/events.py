"""JSON reports of anomalous steps, for people: the affected layers, ranks and samples.

The guard (:mod:`diffmegatron.optim.guard`) detects anomalous steps: infinite, NaN or spikes.
"""

import json
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import write_durably
from diffmegatron.optim.guard import Guard, StepDecision
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.monitoring.records import log_write_errors
from diffmegatron.training.saving.snapshot import ParameterShards

log = logging.getLogger(__name__)

EVENTS = "events"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def write_event(
    run_dir: Path,
    step: int,
    decision: StepDecision,
    event: Mapping[str, Any],
    norms: Mapping[torch.nn.Parameter, float],
    logits: Mapping[int, float],
    shards: ParameterShards,
    parallel_state: ParallelState,
) -> None:
    """Write ``run_dir/events/step_XXXXXXXX.json`` on rank 0, and warn; all ranks must call this.

    Args:
        step: number of the anomalous step, from 1.
        event: further values to write as JSON, the same on every rank.
        norms: norm of each gradient on this rank (``ZeroEngine.local_gradient_norms``).
        logits: largest attention logit of each of this rank's layers, by layer number (from 1).
    """
    named = {shards[parameter][0].name: norm for parameter, norm in norms.items()}
    mine = {
        "rank": parallel_state.rank,
        "gradient_norm_by_layer": _by_layer(named),
        "largest_attention_logit": {f"layer_{layer:02d}": logits[layer] for layer in logits},
        "not_finite": [name for name, norm in named.items() if not math.isfinite(norm)],
    }
    ranks: list[Any] = [None] * parallel_state.world_size
    distributed.all_gather_object(ranks, mine)
    if not parallel_state.is_main:
        return
    log.warning(
        "step %d %s: %s", step, "applied" if decision.applied else "skipped", decision.reason
    )
    decided = {"step": step, "time": round(time.time(), 3), "reason": decision.reason}
    decided |= {"applied": decision.applied, "then": decision.action.value}
    content = json.dumps(_json_numbers({**decided, **event, "ranks": ranks}), indent=1) + "\n"
    with log_write_errors(run_dir / EVENTS):
        write_durably(_new_path(run_dir / EVENTS, step), content.encode())


def stopped_by_guard(
    recipe: Recipe, step: int, decision: StepDecision, guard: Guard, newest: Path | None
) -> UserError:
    """Return the error that ends a run stopped by the guard."""
    warmup = recipe.optimizer.schedule.warmup(recipe.training.total_steps)
    return UserError(
        f"{decision.reason} at step {step}, after {guard.skipped} skipped steps and "
        f"{guard.rollbacks} rollbacks; the run stopped without saving (newest checkpoint: "
        f"{newest.name if newest else 'none'}): see {recipe.run_dir}/{EVENTS}, lower optimizer.lr "
        f"{recipe.optimizer.lr:g} or lengthen optimizer.schedule.warmup_steps "
        f"{warmup}"
    )


def _new_path(directory: Path, step: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"step_{step:08d}.json"
    attempt = 1
    while path.exists():  # A step that is trained again after a rollback can be anomalous again.
        attempt += 1
        path = directory / f"step_{step:08d}_{attempt}.json"
    return path


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Combine norms by tensor name into norms of layers (``layer_01``) and of other tensors."""
    squares: dict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        layer = _LAYER.match(name)
        squares[f"layer_{int(layer[1]) + 1:02d}" if layer else name] += norm**2
    return {name: math.sqrt(square) for name, square in squares.items()}


def _json_numbers(value: Any) -> Any:
    """Replace NaN and infinity in a JSON value by strings, because JSON does not have them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _json_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_json_numbers(each) for each in value]
    return value
