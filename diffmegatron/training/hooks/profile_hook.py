"""A trace of some steps of a run, which TensorBoard and Perfetto open."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from diffmegatron.config.tracking_config import ProfileConfig
from diffmegatron.training.hooks.hook import Hook
from diffmegatron.training.monitoring.progress import say
from diffmegatron.training.monitoring.records import dispensable
from diffmegatron.training.run import Run

PROFILE = "profile"
# Of allocations and frees that a snapshot remembers; torch's own default is without a bound.
_ALLOCATIONS = 1_000_000


class ProfileHook(Hook):
    """Traces ``training.profile.steps`` steps from ``start`` on, once, on the ranks named."""

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._profile: profile | None = None
        self._is_done = False

    def before_training(self, run: Run) -> None:
        """See :class:`Hook`."""
        self._begin_if_due(run)

    def after_step(self, run: Run) -> None:
        """See :class:`Hook`."""
        if run.step + 1 >= self._config.start + self._config.steps:
            self._end(run)
        self._begin_if_due(run)

    def after_training(self, run: Run) -> None:
        """See :class:`Hook`."""
        self._end(run)

    def _begin_if_due(self, run: Run) -> None:
        is_here = run.parallel_state.rank in self._config.ranks
        if run.step + 1 != self._config.start or not is_here or self._profile or self._is_done:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _end(self, run: Run) -> None:
        if self._profile is None:
            return
        folder = Path(run.recipe.run_dir) / PROFILE
        name = f"rank_{run.parallel_state.rank:05d}.step_{self._config.start:08d}"
        with run.pause(), dispensable(folder):
            self._profile.stop()
            folder.mkdir(exist_ok=True)
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            # The ending that TensorBoard's plugin looks for.
            self._profile.export_chrome_trace(str(folder / f"{name}.pt.trace.json.gz"))
            say(f"wrote the trace of steps {self._config.start} to {run.step} into {folder}")
        self._profile, self._is_done = None, True
