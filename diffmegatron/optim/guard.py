"""The guard, which decides from loss and gradient norm whether a training step is applied.

- A step whose loss or gradient norm is not finite is never applied.
- A step whose batch has no label is not applied, because the optimizer would still change weights
  by its momentum and weight decay.
- A spike is a step whose loss or gradient norm is far above the mean of recent steps. The
  recipe's ``guard.spikes`` selects whether spikes are ignored, recorded, or skipped.
- After several skipped steps in a row, the run stops or rolls back. A rollback loads a checkpoint
  and skips the batches that led to the anomaly, as in PaLM (Chowdhery et al. 2022, section 5.1).

The loss and the norm are the same on all ranks, so the decision is the same too.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from diffmegatron.config.recovery_config import GuardConfig

# Lower bound of the standard deviation, as a fraction of the mean. Without the bound, a tiny change
# of nearly constant values would count as a spike.
_LEAST_SPREAD = 0.01


class Action(Enum):
    """Next action of a run after a step; its value is written to reports of anomalous steps."""

    CONTINUE = "continue"
    ROLL_BACK = "roll_back"
    STOP = "stop"


@dataclass(frozen=True)
class StepDecision:
    """The guard's decision on a step.

    Attributes:
        applied: whether the optimizer updates the weights.
        reason: description of the anomaly; None for a step without an anomaly.
        finite: whether loss and gradient norm are finite.
    """

    applied: bool
    action: Action = Action.CONTINUE
    reason: str | None = None
    finite: bool = True


class Guard:
    """The guard of a run; it counts events since the run began.

    Attributes:
        skipped: number of steps skipped because of a value that is not finite, or of a spike.
        spikes: number of spikes.
        rollbacks: number of rollbacks.
        without_labels: number of steps without labels.
    """

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._recent = {
            name: deque[float](maxlen=config.window) for name in ("loss", "gradient norm")
        }
        self._in_a_row = self.skipped = self.spikes = self.rollbacks = self.without_labels = 0

    def decide(self, loss: float | None, gradient_norm: float) -> StepDecision:
        """Return the decision on a step; call this before the optimizer changes anything.

        ``loss`` is None if the batch has no label.
        """
        values = {"gradient norm": gradient_norm}
        if loss is not None:
            values = {"loss": loss} | values
        # DeepSpeed's functions return -1 for a norm that is not finite.
        broken = [f"{name} is {x}" for name, x in values.items() if not 0 <= x < math.inf]
        if broken:
            return replace(self._skip(" and ".join(broken)), finite=False)
        if loss is None:
            self.without_labels += 1
            return StepDecision(applied=False)
        far = [text for name, value in values.items() if (text := self._spike(name, value))]
        if far:
            self.spikes += 1
            if self._config.spikes == "skip":
                return self._skip(" and ".join(far))
        self._in_a_row = 0
        for name, value in values.items():
            self._recent[name].append(value)
        return StepDecision(applied=True, reason=" and ".join(far) or None)

    def state(self) -> dict[str, Any]:
        """Return the guard's state for a checkpoint, as values that JSON can represent."""
        return {
            "recent": {name: list(values) for name, values in self._recent.items()},
            "in_a_row": self._in_a_row,
            "skipped": self.skipped,
            "spikes": self.spikes,
            "rollbacks": self.rollbacks,
            "without_labels": self.without_labels,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set the guard to a state that :meth:`state` has returned."""
        self._restore_recent(state)
        self._in_a_row = int(state["in_a_row"])
        self.skipped, self.spikes = int(state["skipped"]), int(state["spikes"])
        self.rollbacks = int(state["rollbacks"])
        self.without_labels = int(state["without_labels"])

    def rolled_back(self, state: dict[str, Any]) -> None:
        """Count a rollback, and restore the recent losses and norms from a checkpoint's ``state``.

        The number of rollbacks is not restored, so that it can reach ``guard.max_rollbacks``.
        """
        self._restore_recent(state)
        self._in_a_row = 0
        self.rollbacks += 1

    def _restore_recent(self, state: dict[str, Any]) -> None:
        for name, values in state["recent"].items():
            self._recent[name].clear()
            self._recent[name].extend(values)

    def metrics(self) -> dict[str, float]:
        """Return the counts by their metric names."""
        return {
            "guard/skipped_steps": self.skipped,
            "guard/spikes": self.spikes,
            "guard/rollbacks": self.rollbacks,
            "guard/steps_without_labels": self.without_labels,
        }

    def _skip(self, reason: str) -> StepDecision:
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row < self._config.patience:
            return StepDecision(applied=False, reason=reason)
        exhausted = self.rollbacks >= self._config.max_rollbacks
        stop = self._config.then == "stop" or exhausted
        return StepDecision(False, Action.STOP if stop else Action.ROLL_BACK, reason)

    def _spike(self, name: str, value: float) -> str | None:
        recent = self._recent[name]
        if self._config.spikes == "ignore" or 2 * len(recent) < self._config.window:
            return None
        mean = math.fsum(recent) / len(recent)
        variance = math.fsum((other - mean) ** 2 for other in recent) / (len(recent) - 1)
        spread = max(math.sqrt(variance), _LEAST_SPREAD * abs(mean))
        distance = (value - mean) / spread if spread else 0.0
        if distance <= self._config.sigma:
            return None
        return (
            f"{name} {value:.4g} is {distance:.1f} standard deviations above the mean {mean:.4g} "
            f"of the last {len(recent)} steps"
        )
