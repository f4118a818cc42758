"""Tests of runs with several stages, and of runs that start with the weights of another run."""

import os
import signal
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe, load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.training import trainer
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train, train_stages
from tests.conftest import TINY

STAGES = """
stages:
  - name: short
    training: {steps: 4}
  - name: long
    model: {rope_theta: 640000.0}
    data: {upsampling: {mode: per_source, long_tokens: 2000, keep_short: 0.5}}
    training: {steps: 3, seq_length: 128, global_batch_size: 4}
    optimizer: {lr: 1.0e-3, schedule: {kind: linear, warmup_steps: 1}}
"""


@pytest.fixture
def staged(corpus: Path, tmp_path: Path) -> Path:
    file = tmp_path / "staged.yaml"
    file.write_text(TINY.format(run_dir=tmp_path / "run", corpus=corpus) + STAGES)
    return file


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(open_checkpoint(CheckpointStore(run_dir).latest()).weights())


def test_a_stage_is_the_recipe_with_its_changes(staged, tmp_path):
    short, long = load_stages(staged, ["training.seed=5"])
    assert (short.run_dir, long.run_dir) == (f"{tmp_path}/run/short", f"{tmp_path}/run/long")
    assert (short.training.seq_length, long.training.seq_length) == (64, 128)
    assert (short.training.seed, long.training.seed) == (5, 5)
    assert short.checkpoint.start_from is None
    assert long.checkpoint.start_from == short.run_dir
    assert long.model.rope_theta == 640000.0


def test_an_override_of_a_stage_changes_no_other_stage(staged):
    overrides = [
        "stages.long.optimizer.lr=2e-3",
        "optimizer.lr=5e-4",
        "stages.short.training.seed=7",
    ]
    short, long = load_stages(staged, overrides)
    assert (short.optimizer.lr, long.optimizer.lr) == (5e-4, 2e-3)
    assert (short.training.seed, long.training.seed) == (7, 1234)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("stages.medium.optimizer.lr=1", "names no stage of .*one of short, long"),
        ("stages.long.optimizer.lrr=1", "unknown key 'optimizer.lrr'"),
        ("stages.long.checkpoint.start_from=x", "override .* is 'x'; a stage after the first"),
    ],
)
def test_a_mistaken_override_of_a_stage_is_refused(override, sentence, staged):
    with pytest.raises(UserError, match=sentence):
        load_stages(staged, [override])


def test_an_override_of_a_stage_needs_stages(tmp_path, corpus):
    file = tmp_path / "plain.yaml"
    file.write_text(TINY.format(run_dir=tmp_path / "run", corpus=corpus))
    sentence = r"'stages.long.a=1' changes a stage; .*plain.yaml has no stages"
    with pytest.raises(UserError, match=sentence):
        load_stages(file, ["stages.long.a=1"])


def test_a_stage_can_start_from_an_earlier_stage_by_name(staged, tmp_path):
    staged.write_text(staged.read_text() + "  - {name: other, start_from: short}\n")
    short, _, other = load_stages(staged)
    assert other.checkpoint.start_from == short.run_dir == f"{tmp_path}/run/short"


def test_each_stage_starts_with_the_weights_of_the_previous_one(
    staged, tiny_recipe, tmp_path, capfd
):
    stages = load_stages(staged)
    assert train_stages(stages)
    first, second = (Path(stage.run_dir) for stage in stages)
    losses = [entry["valid/loss"] for entry in read_metrics(second) if "valid/loss" in entry]
    ended = [entry["valid/loss"] for entry in read_metrics(first) if "valid/loss" in entry][-1]
    # The second stage begins with the loss at the end of the first stage. An untrained network over
    # 320 token ids would have a loss of about ln 320 = 5.77.
    assert abs(losses[0] - ended) < 0.3
    assert losses[0] < 5.6
    # If start_from is the folder of all stages, a run starts with the weights of the last stage.
    run = tmp_path / "run"
    train(
        tiny_recipe("training.steps=3", f"run_dir={tmp_path}/next", f"checkpoint.start_from={run}")
    )
    said = capfd.readouterr().out
    assert (
        f"weights of {first}/checkpoints/step_00000004\n"
        f"changes of {first}: model.rope_theta 10000.0 -> 640000.0; data.upsampling.mode none -> "
        "per_source; data.upsampling.long_tokens 4096 -> 2000; "
    ) in said
    assert "optimizer.lr 0.003 -> 0.001; optimizer.schedule.kind cosine -> linear; " in said
    assert f"weights of {second}/checkpoints/step_00000003\nchanges of {second}: " in said


def test_a_run_with_a_longer_context_and_unchanged_rope_begins_with_a_warning(staged, caplog):
    assert train_stages(load_stages(staged, ["stages.long.model.rope_theta=1e4"]))
    assert "training.seq_length rises from 64 (" in caplog.text
    assert "/run/short) to 128, and model.rope_theta and model.rope_scaling are" in caplog.text


class _SignalAtTheEnd(Hook):
    """Hook that sends SIGTERM to this process when the first stage is finished and saved."""

    def __init__(self) -> None:
        self._is_sent = False

    def after_training(self, run):
        if not self._is_sent:
            os.kill(os.getpid(), signal.SIGTERM)
        self._is_sent = True


def test_a_stop_signal_at_the_end_of_a_stage_stops_before_the_next_one(staged, capfd):
    stages = load_stages(staged)
    assert not train_stages(stages, hooks=[_SignalAtTheEnd()])
    assert not Path(stages[1].run_dir).exists()
    said = capfd.readouterr().out
    assert said.endswith("stop requested before stage long; the same command resumes with it\n")
    assert train_stages(stages)


def test_a_stage_is_finished_when_its_last_evaluation_is_recorded(staged, capfd):
    stages = load_stages(staged)
    assert train_stages(stages)
    metrics = Path(stages[0].run_dir) / "metrics.jsonl"
    entries = read_metrics(metrics.parent)
    recorded = {each["step"]: each["valid/loss"] for each in entries if "valid/loss" in each}
    assert sorted(recorded) == [0, 4]
    kept = [line for line in metrics.read_text().splitlines(True) if '"valid/loss"' not in line]
    metrics.write_text("".join(kept))
    capfd.readouterr()
    assert train_stages(stages)
    said = capfd.readouterr().out
    assert "stage 1 of 2, short: 4 steps\n" in said and "held-out loss" in said
    assert "stage 2 of 2, long: finished at step 3\n" in said
    again = read_metrics(metrics.parent)
    assert [each["valid/loss"] for each in again if "valid/loss" in each] == [recorded[4]]


def test_a_mistake_in_a_stage_names_it(staged):
    for override, sentence in {
        "stages.long.training.steps=1": "stage 'long': optimizer.schedule.warmup_steps 1 leaves",
        "stages.long.data.packing=most": "stage 'long': the command line: data.packing is 'most'",
    }.items():
        with pytest.raises(UserError, match=rf"staged.yaml, {sentence}"):
            load_stages(staged, [override])
    with pytest.raises(UserError, match="has stages; read it with load_stages"):
        load_recipe(staged)


def test_a_finished_stage_is_skipped_without_reading_its_weights(staged, capfd, monkeypatch):
    stages = load_stages(staged)
    assert train_stages(stages[:1])
    monkeypatch.setattr(trainer, "train", lambda recipe, *_: trained.append(recipe) or True)
    trained: list[Recipe] = []
    # Damage the weights of the finished stage. train_stages must not read them; the run that starts
    # with these weights would check them.
    flip(CheckpointStore(Path(stages[0].run_dir)).latest())
    assert train_stages(stages)
    assert trained == [stages[1]]
    said = capfd.readouterr().out
    assert "stage 1 of 2, short: finished at step 4\n" in said
    assert "stage 2 of 2, long: 3 steps\n" in said
    longer = load_stages(staged, ["stages.short.training.steps=5"])
    assert train_stages(longer) and trained == [stages[1], *longer]
    with pytest.raises(UserError, match=r"short.* was trained with training.seed 1234 and .* 5"):
        train_stages(load_stages(staged, ["training.seed=5"]))


def test_start_from_copies_the_weights_and_resets_the_update_count(staged, tmp_path, tiny_recipe):
    (first, *_) = load_stages(staged)
    train(first)
    # With a learning rate that is too small to change a float32 weight, the final weights are the
    # weights with which the run began.
    frozen = ["optimizer.lr=1e-30", "optimizer.schedule.final_lr=0", "training.steps=3"]
    train(tiny_recipe(*frozen, f"checkpoint.start_from={first.run_dir}"))
    run = tmp_path / "run"
    expected = weights(Path(first.run_dir))
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())
    assert open_checkpoint(CheckpointStore(run).latest()).state["updates"] == 3


def flip(directory: Path) -> None:
    """Flip one bit of a weight; the size and the header of the file stay the same."""
    path = directory / "rank_00000.safetensors"
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1
    path.write_bytes(content)


def test_a_start_from_a_flipped_bit_is_refused(staged, tiny_recipe, tmp_path):
    (first, *_) = load_stages(staged)
    train(first)
    newest = CheckpointStore(Path(first.run_dir)).latest()
    flip(newest)
    for path, sentence in {
        newest: r"rank_00000.safetensors is damaged: its checksum",
        first.run_dir: r"none of the 1 checkpoints in .* is intact",
    }.items():
        with pytest.raises(UserError, match=sentence):
            train(tiny_recipe(f"checkpoint.start_from={path}"))
    assert CheckpointStore(tmp_path / "run").steps() == []


def test_starting_from_a_run_uses_its_newest_intact_checkpoint(staged, tiny_recipe, caplog, capfd):
    (first, *_) = load_stages(staged, ["checkpoint.interval=2"])
    train(first)
    flip(CheckpointStore(Path(first.run_dir)).latest())
    train(tiny_recipe("training.steps=3", f"checkpoint.start_from={first.run_dir}"))
    assert "skipped a damaged checkpoint" in caplog.text and "step_00000004" in caplog.text
    assert "starting with the weights of" in (said := capfd.readouterr().out)
    assert "step_00000002" in said


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("model.num_layers=3", "has model.num_layers 2 and the recipe has 3"),
        ("model.baseline=true", "has model.attention.*'diff_v1'.* recipe has .*'softmax'"),
        ("checkpoint.start_from=nowhere", "is not a checkpoint"),
    ],
)
def test_starting_from_a_different_network_is_refused(override, sentence, staged, tiny_recipe):
    (first, *_) = load_stages(staged)
    train(first)
    with pytest.raises(UserError, match=sentence):
        train(tiny_recipe(f"checkpoint.start_from={first.run_dir}", override))


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ("[{training: {steps: 4}}]", "each with its own name"),
        ("[{name: a}, {name: a}]", "each with its own name"),
        ("[{name: ../up}]", "each with its own name"),
        ("[{name: ..}]", "each with its own name"),
        ("[{name: .hidden}]", "no '-' or '.' first"),
        ("[{name: -rf}]", "no '-' or '.' first"),
        ("[{name: checkpoints}]", "none of attempts, checkpoints, events"),
        (f"[{{name: {65 * 'a'}}}]", "up to 64 letters"),
        (f"[{', '.join(f'{{name: s{i}}}' for i in range(65))}]", "a list of 1 to 64 mappings"),
        ("[]", "stages is \\[\\]; give a list of 1 to 64"),
        ("5", "stages is 5; give a list"),
        ("[{name: a, run_dir: [x]}]", "run_dir is \\['x'\\]: input should be a valid string"),
        ("[{name: a, run_dir: null}]", "run_dir is None"),
        ("[{name: a}, {name: b, checkpoint: 5}]", "checkpoint is 5"),
        ("[{name: a}, {name: b, checkpoint: {start_from: x}}]", "start_from is 'x'; a stage after"),
        (
            "[{name: a, start_from: b}, {name: b}]",
            "start_from is 'b', which is not an earlier stage",
        ),
        ("[{name: a}, {name: b, start_from: [a]}]", "not an earlier stage; give one of a"),
        ("[{name: a}, {name: b, model: {num_layers: 3}}]", "stage 'b' has 3; a run that starts"),
        ("[{name: a}, {name: b, data: {tokenizer: other}}]", "has data.tokenizer 'bytes' and .*"),
        ("[{name: a, traning: {steps: 4}}]", "unknown key 'traning'; did you mean 'training'"),
    ],
)
def test_a_mistaken_list_is_refused(stages, sentence, corpus, tmp_path):
    file = tmp_path / "staged.yaml"
    file.write_text(TINY.format(run_dir=tmp_path, corpus=corpus) + f"stages: {stages}\n")
    with pytest.raises(UserError, match=sentence):
        load_stages(file)
