"""Tests of runs of one process with a NaN or a spike, under each policy of the guard.

The guard decides from the loss and the gradient norm whether a training step is applied, and
whether the run rolls back to a checkpoint or stops.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.errors import UserError
from diffmegatron.training import trainer
from diffmegatron.training.guard_hook import GuardHook
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

SHORT = ["training.steps=12", "checkpoint.interval=4", "training.eval_batches=0"]


@pytest.fixture
def break_steps(monkeypatch):
    """Return a function that multiplies loss and gradients of the given steps by a factor.

    Steps are counted from 1. A step that is repeated after a rollback is counted again. The
    function returns a list with one element: the number of steps until now.
    """

    def install(calls: set[int], factor: float) -> list[int]:
        real, count = trainer.forward_backward, [0]

        def broken(engine, *arguments, **options):
            count[0] += 1
            loss = real(engine, *arguments, **options)
            if count[0] in calls:
                for parameter in engine.network.parameters():
                    parameter.grad *= factor
                return replace(loss, total=loss.total * factor)
            return loss

        monkeypatch.setattr(trainer, "forward_backward", broken)
        return count

    return install


def last(run_dir: str, name: str) -> float:
    return [entry[name] for entry in read_metrics(Path(run_dir)) if name in entry][-1]


def weights(run_dir: str) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(CheckpointStore(Path(run_dir)).latest()).weights())


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_non_finite_step_is_skipped_and_recorded_as_an_event(factor, tiny_recipe, break_steps):
    break_steps({6}, factor)
    recipe = tiny_recipe(*SHORT)
    assert train(recipe)
    assert all(value.isfinite().all() for value in weights(recipe.run_dir).values())
    state = open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest()).state
    assert (state["step"], state["updates"], state["guard"]["skipped"]) == (12, 11, 1)
    assert last(recipe.run_dir, "guard/skipped_steps") == 1
    (path,) = (Path(recipe.run_dir) / "events").iterdir()
    event = json.loads(path.read_text())
    assert path.name == "step_00000006.json"
    assert (event["first_sample"], event["last_sample"]) == (40, 47)
    assert not event["applied"] and event["loss"] == "inf"
    assert set(event["lambda"]) == {"attn/lambda_layer_01", "attn/lambda_layer_02"}
    (rank,) = event["ranks"]
    assert {"layer_01", "layer_02", "embedding.word_embeddings.weight"} < set(
        rank["gradient_norm_by_layer"]
    )
    assert len(rank["not_finite"]) > 10
    assert set(rank["largest_attention_logit"]) == {"layer_01", "layer_02"}
    assert all(0 < logit < 100 for logit in rank["largest_attention_logit"].values())


def test_a_skipped_step_leaves_the_weights_unchanged(tiny_recipe, break_steps, tmp_path):
    """Check that the weights before and after a skipped step are equal to the bit."""
    saved = {}
    for steps, broken in [(5, set()), (6, {6})]:
        break_steps(broken, math.nan)
        fixed = ["optimizer.schedule.kind=constant", "training.eval_batches=0"]
        fixed += [f"training.steps={steps + 1}", f"checkpoint.interval={steps}"]
        recipe = tiny_recipe(*fixed, f"run_dir={tmp_path}/{steps}")
        train(recipe)
        path = CheckpointStore(Path(recipe.run_dir)).path(steps)
        saved[steps] = dict(open_checkpoint(path).weights())
    assert all(torch.equal(saved[5][name], saved[6][name]) for name in saved[5])


@pytest.fixture
def wreck_step(monkeypatch):
    """Return a function that sets the learning rate of one step to 1e30."""

    def install(wrecked: int) -> None:
        real = trainer.learning_rate
        monkeypatch.setattr(
            trainer,
            "learning_rate",
            lambda step, *others: 1e30 if step == wrecked else real(step, *others),
        )

    return install


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_weights_wrecked_by_an_update_are_not_saved(asynchronous, tiny_recipe, wreck_step):
    """Check that a save is dropped if the next step shows that the saved weights are wrecked."""
    wreck_step(4)
    settings = ["checkpoint.interval=2", "guard.patience=2", "guard.max_rollbacks=1"]
    recipe = tiny_recipe(*SHORT, *settings, f"checkpoint.asynchronous={asynchronous}")
    with pytest.raises(UserError, match=r"after 4 skipped steps and 1 rollbacks.*step_00000002"):
        train(recipe)
    assert CheckpointStore(Path(recipe.run_dir)).steps() == [2]
    assert [path.name for path in (Path(recipe.run_dir) / "checkpoints").iterdir()] == [
        "step_00000002"
    ]


@pytest.mark.parametrize("evaluated", [0, 1])
@pytest.mark.parametrize("steps", [4, 5, 6])
def test_a_run_that_ends_with_wrecked_weights_fails(steps, evaluated, tiny_recipe, wreck_step):
    """Check that the run fails and that no checkpoint has the wrecked weights.

    Step 4 wrecks the weights. The run ends at step 4, or after one or two skipped steps.
    """
    wreck_step(4)
    ends = [f"training.steps={steps}", f"training.eval_batches={evaluated}"]
    recipe = tiny_recipe(*ends, "checkpoint.interval=2", "guard.patience=9")
    with pytest.raises(UserError, match=rf"at step {steps}, .*newest checkpoint: step_00000002"):
        train(recipe)
    assert CheckpointStore(Path(recipe.run_dir)).steps() == [2]


def test_a_second_rollback_in_a_row_uses_an_older_checkpoint(tiny_recipe, break_steps):
    """Check a run whose first rollback is to step 4.

    The steps after this rollback fail again, so the second rollback must be to step 2.
    """
    break_steps({6, 7, 8, 9}, math.nan)
    recipe = tiny_recipe(*SHORT, "checkpoint.interval=2", "guard.patience=2")
    assert train(recipe)
    names = {path.name for path in (Path(recipe.run_dir) / "checkpoints").iterdir()}
    assert {"step_00000002", "step_00000004.left", "step_00000004", "step_00000012"} <= names
    state = open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest()).state
    assert state["guard"]["rollbacks"] == 2
    assert state["data"]["consumed_samples"] == (9 + 10) * 8, "nine batches, then steps 3 to 12"


def test_a_rollback_after_skipped_steps_does_not_repeat_batches(tiny_recipe, break_steps):
    count = break_steps({6, 7, 8}, math.nan)
    recipe = tiny_recipe(*SHORT, "guard.patience=3")
    assert train(recipe)
    assert count[0] == 16, "eight batches, then steps 5 to 12"
    state = open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest()).state
    assert state["step"] == 12
    assert state["data"]["consumed_samples"] == 16 * 8
    assert (state["guard"]["rollbacks"], state["guard"]["skipped"]) == (1, 3)
    steps = [e["step"] for e in read_metrics(Path(recipe.run_dir)) if "train/lr" in e]
    assert steps == list(range(1, 13)), "a rollback must remove the metrics of its steps"


def test_rolling_back_restores_the_checkpoint_to_the_bit(tiny_recipe, break_steps, monkeypatch):
    break_steps({6}, math.nan)
    recipe = tiny_recipe(*SHORT, "guard.patience=1")
    seen = {}
    real = GuardHook._roll_back

    def spying(self, run, reason):
        real(self, run, reason)
        tensors = open_checkpoint(run.store.path(4)).tensors
        for fragment in run.engine.fragments():
            for shard in run.shards[fragment.parameter]:
                for kind, value in fragment.tensors.items():
                    part = slice(shard.start, shard.start + shard.numel)
                    saved = tensors.read_box(kind, shard.name, shard.offset, shard.shape)
                    seen[kind, shard.name] = torch.equal(value[part], saved.view(-1))

    monkeypatch.setattr(GuardHook, "_roll_back", spying)
    train(recipe)
    assert len(seen) > 60 and all(seen.values())


@pytest.mark.parametrize(
    ("overrides", "skipped", "rollbacks"),
    [(["guard.then=stop"], 2, 0), (["guard.max_rollbacks=1"], 4, 1)],
)
def test_the_guard_stops_the_run_by_policy_or_after_max_rollbacks(
    overrides, skipped, rollbacks, tiny_recipe, break_steps
):
    break_steps(set(range(6, 99)), math.nan)
    recipe = tiny_recipe(*SHORT, "guard.patience=2", *overrides)
    said = f"after {skipped} skipped steps and {rollbacks} rollbacks; .*step_00000004"
    with pytest.raises(UserError, match=said):
        train(recipe)


@pytest.mark.parametrize(("policy", "updates"), [("ignore", 12), ("record", 12), ("skip", 11)])
def test_a_spike_is_handled_by_the_configured_policy(policy, updates, tiny_recipe, break_steps):
    break_steps({9}, 1000.0)
    recipe = tiny_recipe(*SHORT, f"guard.spikes={policy}", "guard.window=8")
    train(recipe)
    state = open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest()).state
    assert state["updates"] == updates
    events = Path(recipe.run_dir) / "events"
    assert events.exists() == (policy != "ignore")
    if events.exists():
        event = json.loads((events / "step_00000009.json").read_text())
        assert "standard deviations above the mean" in event["reason"]
        assert event["ranks"][0]["not_finite"] == []
