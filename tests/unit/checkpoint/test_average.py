"""A mean of checkpoints equals numpy's mean, can be exported, and can start another run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.weights import average_checkpoints
from diffmegatron.commands.checkpoint import app
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.training.trainer import train
from tests.checkpoints import sign, write_checkpoint


def test_the_last_checkpoints_are_averaged_in_float64(tiny_recipe, tmp_path):
    """Check the values of the mean, an export of the mean, and a run that starts from it.

    No run can resume from the mean, because it has only weights and no optimizer state.
    """
    short = ["training.eval_batches=0", "checkpoint.interval=1"]
    recipe, out = tiny_recipe("training.steps=4", *short), tmp_path / "mean"
    train(recipe)
    said = CliRunner().invoke(
        app, ["average", recipe.run_dir, "--last", "3", "--out", str(out)], catch_exceptions=False
    )
    assert said.exit_code == 0
    assert "step_00000004" in said.output.replace("\n", "")
    store = CheckpointStore(Path(recipe.run_dir))
    parts = [dict(open_checkpoint(store.path(step)).weights()) for step in (2, 3, 4)]
    found, newest = (open_checkpoint(each.path(4)) for each in (CheckpointStore(out), store))
    assert found.is_weights_only and found.state["data"] == newest.state["data"]
    assert sorted(found.tensors.names()) == sorted(parts[0])
    for name, value in found.weights():
        mean = np.mean([part[name].numpy() for part in parts], axis=0, dtype=np.float64)
        np.testing.assert_array_equal(value.numpy(), mean.astype(np.float32), err_msg=name)
    assert export_checkpoint(found.directory, tmp_path / "hf").relative < 1e-5
    start = ["optimizer.lr=1e-30", "optimizer.schedule.final_lr=0", f"checkpoint.start_from={out}"]
    then = tiny_recipe("training.steps=3", *short, *start, f"run_dir={tmp_path / 'then'}")
    assert train(then)
    for name, value in open_checkpoint(CheckpointStore(Path(then.run_dir)).latest()).weights():
        torch.testing.assert_close(
            value, found.tensors.read_tensor("weight", name), rtol=0, atol=1e-20
        )
    with pytest.raises(UserError, match="weights"):
        train(tiny_recipe("training.steps=5", *short, f"run_dir={out}"))


def test_averaging_too_few_or_different_checkpoints_is_refused(tmp_path):
    for step in (10, 20):
        write_checkpoint(tmp_path / "run", step)
    with pytest.raises(
        UserError, match=r"--last is 3 and .* has 2 complete checkpoints; give --last 2"
    ):
        average_checkpoints(tmp_path / "run", 3, tmp_path / "out")
    with pytest.raises(
        UserError, match="has checkpoints already; give a folder without checkpoints"
    ):
        average_checkpoints(tmp_path / "run", 2, tmp_path / "run")
    recipe = tmp_path / "run/checkpoints/step_00000010/recipe.yaml"
    recipe.write_text(recipe.read_text().replace("ffn_hidden_size: 96", "ffn_hidden_size: 128"))
    sign(recipe.parent)
    with pytest.raises(UserError, match=r"model.ffn_hidden_size 128 and .*step_00000020 96; "):
        average_checkpoints(tmp_path / "run", 2, tmp_path / "out")
    assert not (tmp_path / "out").exists()
