"""Tests of the command ``quickstart``, with fewer steps than ``make quickstart`` runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

FEWER = ["training.steps=30", "training.eval_interval=30", "checkpoint.interval=30"]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, "-m", "diffmegatron", "quickstart", *FEWER]
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=1700
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "ETA" in result.stdout
    noise = re.findall(r".*(?:warning|deprecated|no cuda).*", result.stdout + result.stderr, re.I)
    assert noise == [], "libraries print warnings that a user can do nothing about"
    return folder / "runs/quickstart"


@pytest.mark.parametrize("name", ["diff_v1", "softmax"])
def test_model_and_baseline_learn_and_export_exactly(name, quickstart):
    model = json.loads((quickstart / "report.json").read_text())["models"][name]
    assert model["loss_first"] == pytest.approx(5.77, abs=0.05)  # ln(vocab_size) = ln 320
    assert model["loss_last"] < 4
    assert model["logit_difference"]["relative"] < 1e-4
    assert model["tokens_per_second"] > 0
    assert model["continuation"]["text"]


@pytest.mark.parametrize("name", ["diff_v1", "softmax"])
def test_everything_promised_is_written(name, quickstart):
    run = quickstart / name
    assert (run / "metrics.jsonl").exists()
    assert list((run / "tensorboard").glob("events*"))
    assert (run / "checkpoints/step_00000030/manifest.json").exists()
    assert (run / "hf/model.safetensors").exists()
    assert (quickstart / "report.png").read_bytes().startswith(b"\x89PNG")


def test_model_and_baseline_differ_by_lambdas_and_norms(quickstart):
    models = json.loads((quickstart / "report.json").read_text())["models"]
    # Each of the 4 layers has 4 lambda vectors of width 16 and a norm of width 32.
    lambdas_and_norms = 4 * (4 * 16 + 32)
    assert models["diff_v1"]["parameters"] - models["softmax"]["parameters"] == lambdas_and_norms
