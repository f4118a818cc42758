"""MFU (model FLOPs utilization) in the metrics and the progress line of a run with a known GPU."""

import re
from pathlib import Path

import pytest

from diffmegatron.model.accounting.mfu import mfu_metric
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

A100 = "NVIDIA A100-SXM4-80GB"
SHORT = ["training.steps=3", "training.eval_batches=0", "training.precision=bf16"]


def test_a_run_records_and_prints_its_mfu(tiny_recipe, monkeypatch, capsys):
    monkeypatch.setattr("diffmegatron.training.builtin_hooks._gpu_name", lambda: A100)
    recipe = tiny_recipe(*SHORT, "model.baseline=true")
    train(recipe)
    entries = [entry for entry in read_metrics(Path(recipe.run_dir)) if "train/loss" in entry]
    assert len(entries) == 3
    assert len(re.findall(r"tokens/s \| MFU \d+\.\d% \| ETA", capsys.readouterr().out)) == 3
    # A token needs 6 FLOPs per weight of a matrix, and 6 x length x hidden per layer for attention.
    hidden, ffn, layers, length, vocabulary = 64, 96, 2, 64, 320
    attention = recipe.model.attention
    keys = hidden * attention.num_kv_heads // attention.num_heads
    weights = layers * (2 * hidden**2 + 2 * hidden * keys + 3 * hidden * ffn) + vocabulary * hidden
    flops = 6 * weights + layers * 6 * length * hidden
    for entry in entries:
        expected = entry["perf/tokens_per_second"] * flops / 312e12
        assert entry["perf/mfu"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("name", "precision"), [(A100, "fp32"), ("NVIDIA Unknown", "bf16"), (None, "bf16")]
)
def test_no_mfu_is_recorded_without_a_known_peak(name, precision, tiny_recipe):
    recipe = tiny_recipe(f"training.precision={precision}")
    assert mfu_metric(recipe, 1, 1e6, name) == {}


def test_ranks_share_the_peak_of_all(tiny_recipe):
    recipe = tiny_recipe("training.precision=bf16")
    alone, of_four = (mfu_metric(recipe, n, 1e6, A100)["perf/mfu"] for n in (1, 4))
    assert of_four == pytest.approx(alone / 4)
