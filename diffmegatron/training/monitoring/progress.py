"""The console line of a run, and the measurement of its speed."""

import sys
import time
from contextlib import suppress
from datetime import timedelta

from diffmegatron.config.training_config import TrainingConfig


class Progress:
    """Printer of a run's console lines, and meter of its speed from ``first_step`` on."""

    def __init__(self, first_step: int, training: TrainingConfig) -> None:
        self._total_steps = training.total_steps
        self._tokens_per_step = training.tokens_per_step
        self._first = self._marked = (first_step, time.perf_counter())

    def tokens_per_second(self, step: int) -> float:
        """Return tokens per second since the previous call, or since this object was created."""
        marked_step, marked_time = self._marked
        now = time.perf_counter()
        self._marked = (step, now)
        return (step - marked_step) * self._tokens_per_step / (now - marked_time)

    def skip(self, seconds: float) -> None:
        """Exclude a pause, such as an evaluation or a save, from the next ``tokens_per_second``."""
        step, marked_time = self._marked
        self._marked = (step, marked_time + seconds)

    def print_step(self, step: int, values: dict[str, float]) -> None:
        """Print the console line of a step after the first one.

        In ``values``, ``perf/mfu`` may be missing, and the loss of a batch without labels.
        """
        first_step, first_time = self._first
        per_step = (time.perf_counter() - first_time) / (step - first_step)
        left = timedelta(seconds=round(per_step * (self._total_steps - step)))
        utilization = values.get("perf/mfu")
        parts = [
            f"{100 * step / self._total_steps:3.0f}%",
            f"step {step}/{self._total_steps}",
            f"{_short(step * self._tokens_per_step)} tokens",
            *(
                [f"loss {values['train/loss']:.4f}", f"grad norm {values['train/grad_norm']:.2f}"]
                if "train/loss" in values
                else ["no labels"]
            ),
            f"lr {values['train/lr']:.2e}",
            f"{_short(values['perf/tokens_per_second'])} tokens/s",
            *([] if utilization is None else [f"MFU {100 * utilization:.1f}%"]),
            f"ETA {left}",
        ]
        print_line(" | ".join(parts))


def print_line(text: str) -> None:
    """Print a line and flush; ignore the error if standard output is closed or its disk is full."""
    with suppress(OSError):
        print(text, file=sys.stdout, flush=True)


def _short(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f}{unit}"
    return f"{number:.0f}"
