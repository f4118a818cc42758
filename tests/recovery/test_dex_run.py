"""Tests of DEX runs, which start from a softmax checkpoint, anneal, resume and are exported.

DEX subtracts lambda O W_D from the output O of selected heads of ordinary attention. Annealing
changes lambda from 0 to the trained lambda_learn during the first steps.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

STEPS, ANNEALING = 12, 8
SOFTMAX = "model.attention={kind: softmax, num_heads: 8, num_kv_heads: 4}"
DEX = (
    "model.attention={kind: dex, num_heads: 8, num_kv_heads: 4, "
    f"selected_heads: [[0, 5], [1, 2, 6]], annealing_steps: {ANNEALING}}}"
)
OWN = ("dex_projection", "lambda_learn")


@pytest.fixture
def base(tiny_recipe, tmp_path) -> Path:
    """Train a model with softmax attention, and return its run_dir."""
    train(tiny_recipe(SOFTMAX, "training.steps=4", f"run_dir={tmp_path}/base"))
    return tmp_path / "base"


@pytest.fixture
def make(base, tiny_recipe):
    """Return a function that makes recipes of DEX runs, which start from the run ``base``."""

    def recipe(run_dir: Path, *overrides: str):
        own = (f"run_dir={run_dir}", f"checkpoint.start_from={base}")
        return tiny_recipe(
            DEX, f"training.steps={STEPS}", "checkpoint.interval=5", *own, *overrides
        )

    return recipe


def logged(run_dir: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_metrics(run_dir) if name in entry]


def saved(run_dir: Path, step: int):
    return open_checkpoint(CheckpointStore(run_dir).path(step))


def test_a_dex_run_anneals_resumes_exactly_and_exports_as_llama(base, make, tmp_path):
    run = tmp_path / "dex"
    train(make(run))
    # The run starts with the loss of the run ``base``. Its only new tensors are dex_projection
    # (W_D) and lambda_learn.
    assert logged(run, "valid/loss")[0] == logged(base, "valid/loss")[-1]
    names = {*saved(run, 5).tensors.names()} - {*saved(base, 4).tensors.names()}
    assert names == {f"decoder.layers.{i}.self_attention.{own}" for i in (0, 1) for own in OWN}

    # The lambda that is logged at a step follows from lambda_learn in the checkpoint of this step.
    for step in (5, 10, STEPS):
        a = min(1.0, step / ANNEALING)
        for layer in (1, 2):
            own = f"decoder.layers.{layer - 1}.self_attention.lambda_learn"
            learned = saved(run, step).tensors.read_tensor("weight", own).item()
            annealed = (1 - a) * step / ANNEALING * (0.8 - 0.6 * math.exp(-0.3 * (layer - 1)))
            found = logged(run, f"attn/lambda_layer_{layer:02d}")[step - 1]
            assert found == pytest.approx(annealed + a * learned, abs=1e-7)
            assert learned != pytest.approx(0.1, abs=1e-6), "lambda_learn must be trained"

    # A run that resumes at step 5, during the annealing, ends with the same bits.
    parted = tmp_path / "parted"
    shutil.copytree(run, parted)
    for step in (10, STEPS):
        shutil.rmtree(parted / "checkpoints" / f"step_{step:08d}")
    train(make(parted))
    assert logged(parted, "train/loss") == logged(run, "train/loss")
    assert logged(parted, "valid/loss") == logged(run, "valid/loss")
    ends = [saved(each, STEPS).tensors for each in (run, parted)]
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for name in ends[0].names():
            one, other = (end.read_tensor(kind, name) for end in ends)
            assert torch.equal(one, other), (kind, name)

    # A checkpoint during the annealing and the last one are exported as Llama models.
    for step in (5, STEPS):
        out = tmp_path / f"hf{step}"
        checkpoint = CheckpointStore(run).path(step)
        assert export_checkpoint(checkpoint, out).relative < 1e-5
        config = json.loads((out / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf5").state_dict()
    unfolded = saved(run, 5).tensors.read_tensor(
        "weight", "decoder.layers.0.self_attention.linear_proj.weight"
    )
    folded = exported["model.layers.0.self_attn.o_proj.weight"]
    changed = (folded != unfolded).unflatten(1, (8, -1)).any(2).any(0)
    assert changed.nonzero().flatten().tolist() == [0, 5]


def test_a_dex_run_starts_only_from_a_matching_checkpoint(base, make, tiny_recipe, tmp_path):
    wide = make(tmp_path / "other", "model.attention.num_kv_heads=8")
    with pytest.raises(UserError, match=r"num_kv_heads 4 and the recipe has 8"):
        train(wide)
    fingerprint = saved(base, 4).fingerprint()
    on = "model.attention.selected_on={num_layers: 2, num_heads: 8, fingerprint: %s}"
    with pytest.raises(UserError, match=rf"fingerprint abcdef and .* has {fingerprint}; select"):
        train(make(tmp_path / "other", on % "abcdef"))
    assert not (tmp_path / "other" / "checkpoints").is_dir()
    train(make(tmp_path / "dex", on % fingerprint, "training.steps=3"))
    # A new run can start from the DEX run without annealing. A Transformer run cannot: the DEX run
    # must be exported first.
    onwards = (f"checkpoint.start_from={tmp_path}/dex", "model.attention.annealing_steps=null")
    train(make(tmp_path / "on", *onwards, "training.steps=3"))
    back = tiny_recipe(SOFTMAX, f"run_dir={tmp_path}/back", onwards[0])
    with pytest.raises(UserError, match=r"kind 'dex' and the recipe has 'softmax'"):
        train(back)
