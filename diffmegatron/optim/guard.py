"""The guard, which decides from loss and gradient norm whether a step is applied.

The decision uses only numbers that are the same on every rank, so no communication is needed. A
step that is not finite is never applied. A step far above the recent ones is a spike, which is
recorded or skipped. After several skipped steps in a row the run rolls back or stops. PaLM
(Chowdhery et al. 2022, section 5.1) restarts before a spike and skips its batches.
"""

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from diffmegatron.config.recovery_config import GuardConfig

# Lower bound of the standard deviation, as a share of the mean. In a nearly constant window the
# standard deviation is only rounding error. Without the bound, a deviation by 1% of the mean would
# count as a spike.
_LEAST_SPREAD = 0.01


class Action(Enum):
    """The next action of a run after a step."""

    GO_ON = auto()
    ROLL_BACK = auto()
    STOP = auto()


@dataclass(frozen=True)
class StepDecision:
    """The guard's decision on a step.

    Attributes:
        applied: whether the optimizer updates the weights.
        action: what the run does next.
        reason: description of the anomaly; None for a normal step.
        finite: whether loss and gradient norm were finite, which shows that the weights before the
            step were sound.
    """

    applied: bool
    action: Action = Action.GO_ON
    reason: str | None = None
    finite: bool = True


class Guard:
    """Decides on every step of a run by comparison with recent steps."""

    def __init__(self, config: GuardConfig) -> None:
        self._config = config
        self._recent = {
            name: deque[float](maxlen=config.window) for name in ("loss", "gradient norm")
        }
        self._in_a_row = 0
        self.skipped = 0
        self.spikes = 0
        self.rollbacks = 0

    def decide(self, loss: float, gradient_norm: float) -> StepDecision:
        """Decide on a step before the optimizer changes anything, and record the step."""
        values = {"loss": loss, "gradient norm": gradient_norm}
        broken = [f"{name} is {value}" for name, value in values.items() if not _finite(value)]
        if broken:
            return replace(self._skip(" and ".join(broken)), finite=False)
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
        """Return the guard's state, JSON-able and the same on every rank."""
        return {
            "recent": {name: list(values) for name, values in self._recent.items()},
            "in_a_row": self._in_a_row,
            "skipped": self.skipped,
            "spikes": self.spikes,
            "rollbacks": self.rollbacks,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state`."""
        for name, values in state["recent"].items():
            self._recent[name].clear()
            self._recent[name].extend(values)
        self._in_a_row = int(state["in_a_row"])
        self.skipped, self.spikes = int(state["skipped"]), int(state["spikes"])
        self.rollbacks = int(state["rollbacks"])

    def rolled_back(self, state: dict[str, Any]) -> None:
        """Restore the recent steps from a checkpoint's ``state`` after a rollback to it.

        The counts are kept, because with the checkpoint's counts the limit on rollbacks would never
        be reached.
        """
        counts = (self.skipped, self.spikes, self.rollbacks + 1)
        self.restore(state)
        self.skipped, self.spikes, self.rollbacks = counts
        self._in_a_row = 0

    def metrics(self) -> dict[str, float]:
        """Return the counts since the run began."""
        return {
            "guard/skipped_steps": self.skipped,
            "guard/spikes": self.spikes,
            "guard/rollbacks": self.rollbacks,
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


def _finite(value: float) -> bool:
    # DeepSpeed's functions return -1 for a norm that is not finite.
    return math.isfinite(value) and value >= 0
