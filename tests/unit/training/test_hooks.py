"""Hooks of a run: when they are called, in which order, and what they may do."""

import re
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.training.builtin_hooks import builtin_hooks
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


class Watching(Hook):
    """Hook that records its calls and the last saved step, and stops the run at ``stops_at``."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.called: list[tuple[str, int, int | None]] = []
        self._stops_at = stops_at

    def before_training(self, run):
        self._note("before", run)

    def after_step(self, run):
        self._note("step", run)
        run.write_metrics({"my/loss": run.values["train/loss"]})
        if run.step == self._stops_at:
            run.stopping = True

    def after_training(self, run):
        self._note("after", run)

    def _note(self, point, run):
        self.called.append((point, run.step, run.saver.saved_step))


def test_a_user_hook_sees_every_step_and_can_record_and_stop(tiny_recipe):
    recipe = tiny_recipe("training.steps=4", "checkpoint.interval=9", "training.eval_batches=0")
    first, second = Watching(stops_at=2), Watching()
    assert not train(recipe, hooks=[first])
    # A built-in hook saves the last step in its ``after_training``. Built-in hooks are called
    # before a user's hook, so at "after" the user's hook records the saved step.
    assert first.called == [
        ("before", 0, None),
        ("step", 1, None),
        ("step", 2, None),
        ("after", 2, 2),
    ]
    assert CheckpointStore(Path(recipe.run_dir)).steps() == [2]
    assert train(recipe, hooks=[second])
    assert second.called == [("before", 2, 2), ("step", 3, 2), ("step", 4, 2), ("after", 4, 4)]
    entries = read_metrics(Path(recipe.run_dir))
    mine = {entry["step"]: entry["my/loss"] for entry in entries if "my/loss" in entry}
    assert mine == {e["step"]: e["train/loss"] for e in entries if "train/loss" in e}
    assert sorted(mine) == [1, 2, 3, 4]


def test_builtin_hooks_have_the_documented_order(tiny_recipe):
    documented = re.findall(r"^\| \d \| `(\w+)`", ARCHITECTURE.read_text(), re.MULTILINE)
    assert [
        type(hook).__name__ for hook in builtin_hooks(tiny_recipe("training.profile.start=1"), ())
    ] == documented
