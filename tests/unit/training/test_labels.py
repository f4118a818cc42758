"""Training and held-out losses of conversations whose sequences have few labels, or none."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.dex.scores import gradient_sums
from diffmegatron.errors import UserError
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import summed_loss
from diffmegatron.training.monitoring import evaluators
from diffmegatron.training.monitoring.evaluators import measure, split_losses
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

LABELLED = ("short {}?", "reply number {0}. " * 5)
# Most of its sequences lie within the prompt.
LONG_PROMPT = ("a long prompt, number {0}. " * 8, "ok")


def conversations(folder: Path, *kinds: tuple[str, str]) -> str:
    """Prepare 48 conversations of alternating kinds, and return the override of the data."""
    pairs = (kinds[number % len(kinds)] for number in range(48))
    lines = (
        json.dumps({"prompt": prompt.format(number), "response": reply.format(number)})
        for number, (prompt, reply) in enumerate(pairs)
    )
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    prefix = folder / "pairs"
    prepare([folder / "pairs.jsonl"], prefix, "bytes", layout="instruction", show_progress=False)
    return f"data.sources=[{{path: {prefix}}}]"


ONE_PER_STEP = ["data.packing=none", "training.global_batch_size=1", "training.micro_batch_size=1"]


def test_a_held_out_loss_does_not_depend_on_the_batch_size(tiny_recipe, tmp_path):
    """Compare both batch sizes with one mean over all labels of the sequences."""
    data = [conversations(tmp_path, LABELLED, LONG_PROMPT), "data.validation_fraction=0.5"]
    one = tiny_recipe(*data, *ONE_PER_STEP, "training.eval_batches=16")
    whole = tiny_recipe(*data, "data.packing=none", "training.global_batch_size=16")
    with process_groups(one.parallel, one.training.seed) as state:
        network = build_model(one, state)
        found = [
            measure([split_losses(recipe)[0]], network, state, lambda: True)["valid/loss"]
            for recipe in (one, whole)
        ]
        batches = open_loader(whole, state, "validation").read_step(0)
        with torch.no_grad():
            total = sum(summed_loss(network, batch).double() for batch in batches)
        labels = sum(batch.loss_mask.sum() for batch in batches)
    expected = {"valid/loss": pytest.approx((total / labels).item(), rel=1e-6)}
    assert found == [expected, expected]


def test_steps_without_labels_are_counted_and_change_nothing(tiny_recipe, tmp_path, caplog):
    data = conversations(tmp_path, LABELLED, LONG_PROMPT, LONG_PROMPT)
    settings = ["training.steps=8", "training.eval_batches=0", "checkpoint.interval=1"]
    recipe = tiny_recipe(data, *ONE_PER_STEP, *settings)
    with caplog.at_level(logging.WARNING):
        assert train(recipe)
    entries = [e for e in read_metrics(Path(recipe.run_dir)) if "train/lr" in e]
    empty = [e["step"] for e in entries if e["train/loss_tokens"] == 0]
    assert 2 <= len(empty) < 8, "the steps must be of both kinds"
    for entry in entries:
        is_empty = entry["step"] in empty
        assert is_empty != ("train/loss" in entry) and is_empty != ("train/grad_norm" in entry)
        assert entry["guard/steps_without_labels"] == sum(n <= entry["step"] for n in empty)
        assert entry["guard/skipped_steps"] == 0
    assert [r.args for r in caplog.records if "of such steps" in r.msg][:2] == [
        (empty[0], 1),
        (empty[1], 2),
    ]
    assert "sequences from sample 0 on have no label with loss" in caplog.text
    store = CheckpointStore(Path(recipe.run_dir))
    opened = {step: open_checkpoint(store.path(step)) for step in store.steps()}
    for step in (step for step in store.steps() if step - 1 in opened):
        before, after = (dict(opened[each].weights()) for each in (step - 1, step))
        is_equal = all(torch.equal(before[name], after[name]) for name in before)
        assert is_equal == (step in empty)
    assert opened[8].state["guard"]["without_labels"] == len(empty)
    assert opened[8].state["updates"] == 8 - len(empty)


def test_batches_without_labels_have_no_mean(tiny_recipe, monkeypatch, capsys):
    def without_labels(*arguments):
        batches = on_this_rank(*arguments)
        return [replace(each, loss_mask=torch.zeros_like(each.loss_mask)) for each in batches]

    monkeypatch.setattr(evaluators, "on_this_rank", without_labels)
    recipe = tiny_recipe()
    with process_groups(recipe.parallel, recipe.training.seed) as state:
        network = build_model(recipe, state)
        found = measure(split_losses(recipe)[:1], network, state, lambda: True)
        assert found == {"valid/loss": {"valid/loss/without_values": 1.0}}
        assert "valid/loss has no value" in capsys.readouterr().out
        batches = without_labels(open_loader(recipe, state, "train").read_step(0), state)
        with pytest.raises(UserError, match="no label with loss, so no head has an importance"):
            gradient_sums(network, batches, state)
        with torch.no_grad():
            next(network.parameters()).fill_(math.nan)
        broken = measure(split_losses(recipe)[:1], network, state, lambda: True)
        assert broken == {"valid/loss": {"valid/loss": math.inf}}
