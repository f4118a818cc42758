"""Every layout is the same run: initial weights, losses, gradient norms, saved weights.

Each number of ranks is one launch that trains all its layouts; the reference is one process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.contents import open_checkpoint
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.hf.from_checkpoint import export_checkpoint
from diffmegatron.training.metrics import read_metrics
from diffmegatron.training.trainer import train
from tests.conftest import TINY
from tests.parallel.worker import initial_hash

TIED = "model.tied_embeddings=true"
SOFTMAX = "model.attention=softmax"
BF16 = "training.precision=bf16"
TENSOR, SEQUENCE = "parallel.tensor=2", "parallel.sequence_parallel=true"

# name: (ranks, overrides); the first word of the name says which single process it must equal.
LAYOUTS = {
    "plain-tensor": (2, [TENSOR]),
    "plain-sequence": (2, [TENSOR, SEQUENCE]),
    "plain-data": (2, ["parallel.zero_stage=1"]),
    "plain-zero2": (2, ["parallel.zero_stage=2"]),
    "plain-pipeline": (2, ["parallel.pipeline=2"]),
    "tied-pipeline": (2, [TIED, "parallel.pipeline=2"]),
    "softmax-sequence": (2, [SOFTMAX, TENSOR, SEQUENCE]),
    "bf16-tensor": (2, [BF16, TENSOR, SEQUENCE]),
    "bf16-data": (2, [BF16, "parallel.zero_stage=1"]),
    "plain-tensor-data": (4, [TENSOR, SEQUENCE, "parallel.zero_stage=2"]),
    "tied-tensor-pipeline": (4, [TIED, TENSOR, "parallel.pipeline=2"]),
}
MODELS = {"plain": [], "tied": [TIED], "softmax": [SOFTMAX], "bf16": [BF16]}
# bf16 rounds every activation to 2^-9 and the layouts sum in other orders; over 20 updates the
# losses part by what that makes of the weights.
TOLERANCE = {"plain": 1e-5, "tied": 1e-5, "softmax": 1e-5, "bf16": 2e-2}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the finished run of every layout and of every single process."""
    out = tmp_path_factory.mktemp("layouts")
    file = out / "tiny.yaml"
    file.write_text(TINY.format(run_dir=out / "unused", corpus=corpus))
    for name, overrides in MODELS.items():
        recipe = load_recipe(file, [*overrides, f"run_dir={out}/{name}"])
        train(recipe)
        (out / name / "initial.txt").write_text(initial_hash(recipe))
    for ranks in (2, 4):
        layouts = [
            f"{name}:{','.join(overrides)}"
            for name, (size, overrides) in LAYOUTS.items()
            if size == ranks
        ]
        launch(ranks, [str(file), str(out), *layouts])
    return out


def launch(ranks: int, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", "tests.parallel.worker", *arguments]
    result = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parent.parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def series(run_dir: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_metrics(run_dir) if name in entry]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_initial_weights_are_the_same_bits(layout, runs):
    model = layout.split("-")[0]
    assert (runs / layout / "initial.txt").read_text() == (runs / model / "initial.txt").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("metric", ["train/loss", "train/grad_norm", "valid/loss"])
def test_curves_are_the_same(layout, metric, runs):
    model = layout.split("-")[0]
    expected = series(runs / model, metric)
    assert len(expected) == (20 if metric.startswith("train") else 2)
    scale = 10 if metric == "train/grad_norm" else 1
    tolerance = TOLERANCE[model] * scale
    assert series(runs / layout, metric) == pytest.approx(expected, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if not name.startswith("bf16")])
def test_saved_weights_are_the_same(layout, runs):
    expected = open_last(runs / layout.split("-")[0])
    saved = open_last(runs / layout)
    assert sorted(saved.names()) == sorted(expected.names())
    for name in expected.names():
        # Adam divides by the gradient's own size: where that is rounding noise, an element may
        # move by a part of the learning rate (3e-3) in either direction.
        torch.testing.assert_close(
            saved.whole("weight", name), expected.whole("weight", name), rtol=0, atol=5e-4
        )


@pytest.mark.parametrize("layout", ["plain", "plain-tensor-data", "tied-tensor-pipeline"])
def test_any_layout_exports(layout, runs, tmp_path):
    latest = CheckpointStore(runs / layout).latest()
    difference = export_checkpoint(latest, tmp_path / "hf")
    assert difference.relative < 1e-5


@pytest.mark.parametrize("metric", ["attn/lambda_layer_01", "attn/lambda_layer_02"])
@pytest.mark.parametrize("layout", ["plain-tensor", "plain-pipeline", "tied-tensor-pipeline"])
def test_lambda_is_logged_for_every_layer_of_every_stage(layout, metric, runs):
    expected = series(runs / layout.split("-")[0], metric)
    assert len(expected) == 20
    assert series(runs / layout, metric) == pytest.approx(expected, abs=1e-4)


def open_last(run_dir: Path):
    return open_checkpoint(CheckpointStore(run_dir).latest()).tensors
