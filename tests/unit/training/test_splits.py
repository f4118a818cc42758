"""The losses of held-out splits that a run measures, and the steps at which it measures them."""

from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.weights import load_network
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.errors import UserError
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.batches import open_loader
from diffmegatron.training.compute.step import summed_loss
from diffmegatron.training.monitoring.due import due_at
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train


def test_the_test_documents_are_measured_once_after_the_last_step(tiny_recipe):
    recipe = tiny_recipe("training.steps=4", "training.eval_interval=2", "data.test_fraction=0.2")
    train(recipe)
    found = {
        name: {e["step"]: e[name] for e in read_metrics(Path(recipe.run_dir)) if name in e}
        for name in ("valid/loss", "test/loss")
    }
    assert sorted(found["valid/loss"]) == [0, 2, 4] and sorted(found["test/loss"]) == [4]
    # Compute the losses of the saved weights on the held-out documents independently of the run.
    checkpoint = open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest())
    with process_groups(recipe.parallel, recipe.training.seed) as state:
        network = load_network(checkpoint, recipe, state).eval()
        for name, split in (("valid/loss", "validation"), ("test/loss", "test")):
            batch = open_loader(recipe, state, split).read_step(0)
            with torch.no_grad():
                losses = [summed_loss(network, each) for each in batch]
            mean = sum(losses) / sum(each.loss_mask.sum() for each in batch)
            assert found[name][4] == pytest.approx(mean.item(), rel=1e-6)


def test_a_run_that_holds_nothing_out_measures_no_held_out_loss(tiny_recipe):
    recipe = tiny_recipe(
        "training.steps=2", "optimizer.schedule.warmup_steps=1", "training.eval_interval=1"
    )
    data = recipe.data.model_copy(update={"validation_fraction": 0.0})
    assert due_at(recipe, 1) == ["valid/loss"]
    assert due_at(recipe.model_copy(update={"data": data}), 1) == []
    with pytest.raises(UserError, match=r"data\.validation_fraction is 0"):
        open_samples(data, 64, 0, "validation")
