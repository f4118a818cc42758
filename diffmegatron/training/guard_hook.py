"""The hook that reports anomalous steps (NaN, infinity, spikes), and rolls back or ends the run."""

import json
import logging
import math
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch import distributed
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.files import write_durably
from diffmegatron.optim.guard import Action
from diffmegatron.training.compute.agreement import lambdas
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.attention_logits import observed_logits
from diffmegatron.training.monitoring.records import log_write_errors
from diffmegatron.training.run import Run
from diffmegatron.training.saving.resume import rollback_checkpoint

log = logging.getLogger(__name__)

EVENTS = "events"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class GuardHook(Hook):
    """Writes a report of each anomalous step, and carries out the guard's decision on it."""

    def __init__(self) -> None:
        # Update count right after the last rollback; None before the first one. An equal count at
        # the next rollback shows that no step was applied in between.
        self._updates_returned_to: int | None = None

    @override
    def after_step(self, run: Run) -> None:
        if run.agreed.loss is None:
            _warn_of_no_labels(run)
        if run.decision.reason is None:
            return
        _write_report(run)
        if run.decision.action is Action.STOP:
            give_up(run, run.decision.reason)
        if run.decision.action is Action.ROLL_BACK:
            self._roll_back(run, run.decision.reason)

    def _roll_back(self, run: Run, reason: str) -> None:
        """Load an intact checkpoint, or give up; continue with the data after the last batch."""
        with run.pause():
            run.complete_or_drop_save()
            run.saver.wait()
            no_progress = run.engine.updates == self._updates_returned_to
            checkpoint = rollback_checkpoint(run.store, run.parallel_state, no_progress=no_progress)
            if checkpoint is None:
                give_up(run, reason)
            position = run.resume(checkpoint)
            assert position.guard is not None
            run.guard.rolled_back(position.guard)
            run.set_step(position.step)
            run.saver.saved_step = position.step
            self._updates_returned_to = position.updates
        run.rewind_metrics()


def give_up(run: Run, reason: str) -> NoReturn:
    """Complete or drop a started save, and end the run with an error."""
    run.complete_or_drop_save()
    newest, recipe = run.store.latest(), run.recipe
    raise UserError(
        f"{reason} at step {run.step}, after {run.guard.skipped} skipped steps and "
        f"{run.guard.rollbacks} rollbacks; the run stopped without saving (newest checkpoint: "
        f"{newest.name if newest else 'none'}): see {recipe.run_dir}/{EVENTS}, lower optimizer.lr "
        f"{recipe.optimizer.lr:g} or lengthen optimizer.schedule.warmup_steps "
        f"{recipe.optimizer.schedule.warmup(recipe.training.total_steps)}"
    )


def _warn_of_no_labels(run: Run) -> None:
    """Log the number of steps without labels, each time that it reaches a power of two."""
    count = run.guard.without_labels
    if run.parallel_state.is_main and count.bit_count() == 1:
        log.warning(
            "step %d has no label, so it has no loss and changes no weight; number of such steps "
            "in this run: %d",
            run.step,
            count,
        )


def _write_report(run: Run) -> None:
    """Write ``events/step_XXXXXXXX.json`` on rank 0; all ranks must call this.

    The report has, for each rank, gradient norms, largest attention logits and the names of tensors
    whose gradients are not finite.
    """
    decision, parallel_state = run.decision, run.parallel_state
    last_sample = run.loader.consumed_samples - 1
    lambda_by_layer = lambdas(run.network, parallel_state)
    norms = {
        run.shards[parameter][0].name: norm
        for parameter, norm in run.engine.local_gradient_norms().items()
    }
    mine = {
        "rank": parallel_state.rank,
        "gradient_norm_by_layer": _by_layer(norms),
        "largest_attention_logit": _largest_logits(run),
        "not_finite": [name for name, norm in norms.items() if not math.isfinite(norm)],
    }
    ranks: list[Any] = [None] * parallel_state.world_size
    distributed.all_gather_object(ranks, mine)
    if not parallel_state.is_main:
        return
    log.warning(
        "step %d %s: %s", run.step, "applied" if decision.applied else "skipped", decision.reason
    )
    report = {
        "step": run.step,
        "time": round(time.time(), 3),
        "reason": decision.reason,
        "applied": decision.applied,
        "then": decision.action.value,
        "loss": run.agreed.loss,
        "gradient_norm": run.agreed.gradient_norm,
        "first_sample": last_sample + 1 - run.recipe.training.global_batch_size,
        "last_sample": last_sample,
        "lambda": lambda_by_layer,
        "ranks": ranks,
    }
    # JSON has no NaN and infinity, so write them as strings: "nan", "inf" and "-inf".
    valid = json.loads(json.dumps(report), parse_constant=lambda name: str(float(name)))
    directory = Path(run.recipe.run_dir) / EVENTS
    with log_write_errors(directory):
        content = json.dumps(valid, indent=1) + "\n"
        write_durably(_new_path(directory, run.step), content.encode())


def _new_path(directory: Path, step: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"step_{step:08d}.json"
    attempt = 1
    while path.exists():  # A step that is trained again after a rollback can be anomalous again.
        attempt += 1
        path = directory / f"step_{step:08d}_{attempt}.json"
    return path


def _by_layer(norms: Mapping[str, float]) -> dict[str, float]:
    """Return one norm per layer, such as "layer_01", and one norm per tensor outside the layers."""
    squares: dict[str, float] = defaultdict(float)
    for name, norm in norms.items():
        layer = _LAYER.match(name)
        squares[f"layer_{int(layer[1]) + 1:02d}" if layer else name] += norm**2
    return {name: math.sqrt(square) for name, square in squares.items()}


def _largest_logits(run: Run) -> dict[str, float]:
    """Return the largest attention logit of each layer on the last batch, by layer name.

    With context parallelism the result is empty, because a rank lacks the keys of other ranks.
    """
    if run.parallel_state.context_size > 1:
        return {}
    with run.pause(), observed_logits(run.network) as found:
        run.is_last_batch_finite()
    return {f"layer_{layer:02d}": found[layer].max().item() for layer in sorted(found)}
