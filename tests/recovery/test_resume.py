"""Tests that a resumed run equals an undisturbed run, and that other settings are refused."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training import trainer
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.saving.resume import starting_checkpoint
from diffmegatron.training.trainer import train


def losses(run_dir: Path) -> list[tuple[float, float, float]]:
    entries = [entry for entry in read_metrics(run_dir) if "train/loss" in entry]
    return [(e["step"], e["train/loss"], e["train/grad_norm"]) for e in entries]


def z_losses(run_dir: Path) -> list[float]:
    return [entry["train/z_loss"] for entry in read_metrics(run_dir) if "train/loss" in entry]


def stopped_at_10(finished: Path, run_dir: Path) -> None:
    """Copy a finished run, as if it had been killed after its checkpoint at step 10."""
    shutil.copytree(finished, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step_00000020")


@pytest.mark.parametrize(
    "attention",
    [
        ("model.attention.qk_norm=true", "model.attention.output_gate=elementwise"),
        ("model.baseline=true",),
        (
            "model.attention.kind=diff_v2",
            "model.attention.output_gate=headwise",
            "model.attention.window=24",
        ),
        ("optimizer.kind=muon",),
    ],
)
def test_resuming_is_exact_to_the_bit(attention, tiny_recipe, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(tiny_recipe(*attention, f"run_dir={whole}"))
    stopped_at_10(whole, parted)
    train(tiny_recipe(*attention, f"run_dir={parted}"))
    assert len(losses(whole)) == 20
    assert losses(parted) == losses(whole)
    ends = [open_checkpoint(CheckpointStore(run).latest()) for run in (whole, parted)]
    for name in ends[0].tensors.names():
        for kind in ends[0].tensors.kinds(name):
            one, other = (end.tensors.read_tensor(kind, name) for end in ends)
            assert torch.equal(one, other), (kind, name)
    assert ends[0].state["data"] == ends[1].state["data"]


def test_resuming_bf16_with_a_z_loss_is_exact_to_the_bit(tiny_recipe, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    overrides = ("training.precision=bf16", "training.z_loss=0.01")
    train(tiny_recipe(*overrides, f"run_dir={whole}"))
    stopped_at_10(whole, parted)
    train(tiny_recipe(*overrides, f"run_dir={parted}"))
    assert losses(parted) == losses(whole)
    first, *rest = z_losses(whole)
    assert z_losses(parted) == [first, *rest]
    # The logits of an untrained network are small, so the sum over 320 tokens is about 320.
    assert len(rest) == 19
    assert first == pytest.approx(0.01 * math.log(320) ** 2, rel=0.1)


def test_a_run_of_adamw_resumes_with_muon_and_not_the_reverse(tiny_recipe, tmp_path, caplog):
    # At a learning rate of almost zero, only the momentum shows what a step has read.
    adamw = ("checkpoint.interval=1", "optimizer.lr=1e-9")
    adamw += ("optimizer.schedule={kind: constant, final_lr: 0, warmup_steps: 0}",)
    muon = (*adamw, "optimizer.kind=muon", "optimizer.muon.momentum=0.5")
    train(tiny_recipe("training.steps=1", *adamw))
    train(tiny_recipe("training.steps=2", *muon))
    assert "second moments are lost" in caplog.text
    run = Path(tiny_recipe().run_dir)
    one, two = (
        open_checkpoint(run / "checkpoints" / f"step_0000000{step}").tensors for step in (1, 2)
    )
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert two.kinds(name) == ("weight", "exp_avg")
    assert two.kinds("output_layer.weight") == ("weight", "exp_avg", "exp_avg_sq")
    train(tiny_recipe("training.steps=2", *adamw, f"run_dir={tmp_path}/undisturbed"))
    expected = open_checkpoint(tmp_path / "undisturbed/checkpoints/step_00000002").tensors
    first = one.read_tensor("exp_avg", name)
    # AdamW: m2 = 0.9 m1 + 0.1 g, so Muon's momentum is 0.5 m1 + 0.5 g = 5 m2 - 4 m1.
    momentum = 5 * expected.read_tensor("exp_avg", name) - 4 * first
    torch.testing.assert_close(two.read_tensor("exp_avg", name), momentum, rtol=1e-3, atol=1e-7)
    with pytest.raises(UserError, match="no second moments of its matrices"):
        train(tiny_recipe("training.steps=3", *adamw))


TRAINED = (
    "optimizer.trainable=['*.linear_qkv.weight:[kv]', '*.mlp.*', '*.lambda_?1']",
    "optimizer.lr_multipliers={'*.lambda_*': 30}",
    "optimizer.schedule={kind: wsd, warmup_steps: null, warmup_ratio: 0.1, decay_ratio: 0.6}",
)


@pytest.mark.parametrize(
    "overrides",
    [TRAINED, (*TRAINED, "training.precision=bf16", "parallel.zero_stage=3")],
    ids=["fp32", "bf16 ZeRO 3"],
)
def test_resuming_with_frozen_weights_is_exact_to_the_bit(overrides, tiny_recipe, tmp_path):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train(tiny_recipe(*overrides, f"run_dir={whole}"))
    stopped_at_10(whole, parted)
    train(tiny_recipe(*overrides, f"run_dir={parted}"))
    assert losses(parted) == losses(whole)
    first, *ends = (
        open_checkpoint(run / "checkpoints" / f"step_{step:08d}").tensors
        for run, step in ((whole, 10), (whole, 20), (parted, 20))
    )
    for name in ends[0].names():
        kinds = ends[0].kinds(name)
        assert kinds == ends[1].kinds(name)
        for kind in kinds:
            one, other = (end.read_tensor(kind, name) for end in ends)
            assert torch.equal(one, other), (kind, name)
        if len(kinds) == 1:
            assert torch.equal(
                first.read_tensor("weight", name), ends[0].read_tensor("weight", name)
            )
    # Frozen lambda vectors stay in float32, also in a bf16 run under ZeRO 3.
    value = ends[0].read_tensor("weight", "decoder.layers.0.self_attention.lambda_q2")
    assert ends[0].kinds("decoder.layers.0.self_attention.lambda_q2") == ("weight",)
    assert not torch.equal(value, value.bfloat16().float())


def test_a_finished_run_has_nothing_left_to_do(tiny_recipe):
    recipe = tiny_recipe()
    train(recipe)
    before = losses(Path(recipe.run_dir))
    train(recipe)
    assert losses(Path(recipe.run_dir)) == before


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.num_layers=3", "model.num_layers 2 and the recipe has 3"),
        (
            "model.attention.kind=diff_v2",
            "model.attention.*'diff_v1'.* the recipe has .*'diff_v2'",
        ),
        ("training.seed=7", "training.seed 1234 and the recipe has 7"),
        ("training.global_batch_size=4", "training.global_batch_size 8"),
        ("optimizer.trainable=['*.mlp.*']", r"optimizer.trainable None and .* \['\*.mlp.\*'\];"),
        ("model.lora={rank: 2, alpha: 2}", "model.lora None and the recipe has"),
        ("training.steps=3", "is at step 4 and the recipe ends at step 3"),
        ("checkpoint.resume=false", "checkpoint.resume is false"),
    ],
)
def test_an_incompatible_recipe_in_the_same_run_dir_is_refused(override, sentence, tiny_recipe):
    recipe = tiny_recipe("training.steps=4")
    train(recipe)
    before = sorted(Path(recipe.run_dir).rglob("*"))
    with pytest.raises(UserError, match=sentence):
        train(tiny_recipe("training.steps=4", override))
    assert sorted(Path(recipe.run_dir).rglob("*")) == before


def test_a_damaged_newest_checkpoint_is_skipped_and_a_longer_run_is_reported(tiny_recipe, caplog):
    recipe = tiny_recipe()
    train(recipe)
    expected = losses(Path(recipe.run_dir))
    newest = CheckpointStore(Path(recipe.run_dir)).latest()
    (newest / "rank_00000.safetensors").write_bytes(b"damaged")
    train(recipe)
    assert losses(Path(recipe.run_dir)) == expected
    # The cosine of 40 steps is at half of the range at step 21; that of 20 steps ended at 3e-4.
    with process_groups(recipe.parallel, recipe.training.seed) as state:
        starting_checkpoint(
            CheckpointStore(Path(recipe.run_dir)), tiny_recipe("training.steps=40"), state
        )
    assert "rises from 0.0003 at step 20 to 0.00165 at step 21" in caplog.text
    assert "the decay of the 20-step run had begun after step 2" in caplog.text


def test_a_non_finite_loss_stops_the_run_and_saves_nothing(tiny_recipe, monkeypatch, capfd):
    real = trainer.forward_backward

    def broken(*arguments, **options):
        loss = real(*arguments, **options)
        return replace(loss, total=loss.total * math.nan)

    monkeypatch.setattr(trainer, "forward_backward", broken)
    recipe = tiny_recipe()
    with pytest.raises(UserError, match=r"loss is inf .*at step 3, after 3 skipped.* optimizer.lr"):
        train(recipe)
    assert CheckpointStore(Path(recipe.run_dir)).steps() == []


def test_a_failed_save_leaves_no_partial_checkpoint(tiny_recipe, monkeypatch):
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffmegatron.training.saving.saver.write_pieces", full_disk)
    recipe = tiny_recipe("training.steps=4")
    with pytest.raises(UserError, match=r"cannot write .*rank_00000.*: No space left"):
        train(recipe)
    assert list((Path(recipe.run_dir) / "checkpoints").iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(tiny_recipe, tmp_path):
    recipe = tiny_recipe("training.steps=3")
    train(recipe)
    newest = CheckpointStore(Path(recipe.run_dir)).latest()
    file = newest / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        export_checkpoint(newest, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_a_run_dir_that_is_a_file_is_refused(tiny_recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        train(tiny_recipe(f"run_dir={tmp_path}/file"))


def test_a_change_of_data_sources_is_reported(tiny_recipe, corpus, tmp_path, capfd):
    train(tiny_recipe("training.steps=3"))
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"moved{suffix}")
    train(tiny_recipe("training.steps=4", f"data.sources=[{{path: {tmp_path}/moved}}]"))
    assert "data.sources changed" not in capfd.readouterr().out, "only the path changed"
    prepare([Path(__file__)], tmp_path / "own", "bytes", show_progress=False)
    other = f"{{path: {tmp_path}/own, weight: 2}}"
    train(tiny_recipe("training.steps=5", f"data.sources=[{{path: {corpus}}}, {other}]"))
    said = f"data.sources changed: from sample 32 on {corpus} 1, {tmp_path}/own 2"
    assert said in capfd.readouterr().out
