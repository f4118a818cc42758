"""``training.wandb`` with a fake package: values sent to W&B, and failures of W&B."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from diffmegatron.errors import UserError
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train, train_stages

SHORT = ["training.steps=4", "training.eval_batches=0", "checkpoint.interval=2"]
TOLD = "training.wandb={project: pairs, name: first}"


class FakeRun:
    """Fake W&B run that stores arguments and values; ``log`` fails at call number ``fails_at``."""

    def __init__(self, fails_at: int | None, **given: object) -> None:
        self.given, self.logged, self.defined, self.ended = given, [], [], []
        self._fails_at = fails_at

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)
        if self._fails_at == len(self.logged):
            raise ConnectionError("no network")

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch):
    """Replace the package ``wandb`` with a fake, and return the fake.

    The attribute ``runs`` lists the started runs. If ``fails_at`` is 0, no run can start.
    """
    fake = ModuleType("wandb")
    fake.__spec__, fake.runs, fake.fails_at = ModuleSpec("wandb", None), [], None

    def init(**given):
        if fake.fails_at == 0:
            raise RuntimeError("no such entity")
        fake.runs.append(FakeRun(fake.fails_at, **given))
        return fake.runs[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_every_metric_and_continues_after_a_resume(tiny_recipe, wandb):
    recipe = tiny_recipe(*SHORT, TOLD)
    train(tiny_recipe(*SHORT, TOLD, "training.steps=3"))
    train(recipe)
    first, second = wandb.runs
    run_dir = Path(recipe.run_dir)
    entries = [{k: v for k, v in e.items() if k != "time"} for e in read_metrics(run_dir)]
    assert [*first.logged, *second.logged] == entries
    assert first.given["project"] == "pairs" and first.given["name"] == "first"
    assert first.given["config"]["model"]["hidden_size"] == 64
    assert first.given["id"] == second.given["id"] == (run_dir / "wandb_id").read_text().strip()
    assert first.defined == [("*", "step")] and first.ended == second.ended == [0]


@pytest.mark.parametrize(("fails_at", "told"), [(0, "could not begin"), (2, "could not continue")])
def test_a_wandb_failure_does_not_end_the_run(fails_at, told, tiny_recipe, wandb, caplog):
    wandb.fails_at = fails_at
    recipe = tiny_recipe(*SHORT, TOLD)
    assert train(recipe)
    assert caplog.text.count("W&B") == 1 and told in caplog.text
    assert [len(run.logged) for run in wandb.runs] == [2] * bool(fails_at)
    assert len([e for e in read_metrics(Path(recipe.run_dir)) if "train/loss" in e]) == 4


def test_without_the_package_the_recipe_is_refused_before_any_stage(tiny_recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    first, second = tiny_recipe(*SHORT), tiny_recipe(*SHORT, TOLD)
    for stages in ([second], [first, second]):
        with pytest.raises(UserError, match=r"'pairs'.*not installed; install diffmegatron\[wandb"):
            train_stages(stages)
    assert not Path(first.run_dir).exists()
