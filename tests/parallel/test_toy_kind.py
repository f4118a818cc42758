"""Test that a new kind of attention, defined in one file, can be planned, trained and resumed."""

import subprocess
from pathlib import Path

import pytest

from diffmegatron.checkpoint.sharded import ShardedReader
from diffmegatron.training.monitoring.metrics import read_metrics
from tests import forks
from tests.conftest import TINY
from tests.paths import ROOT
from tests.ranks import launch

TOY = Path(__file__).parent / "toy_kind.py"
GAINS = "decoder.layers.0.self_attention.gains"


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Path:
    file = tmp_path / "toy.yaml"
    file.write_text(TINY.format(run_dir=tmp_path / "run", corpus=corpus))
    return file


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [forks.python(), "-m", "tests.parallel.toy_kind", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_new_kind_plans_trains_resumes_and_refuses_export(recipe, tmp_path):
    assert len(TOY.read_text().splitlines()) < 60
    kind = "model.attention={kind: gained, num_heads: 4, num_kv_heads: 2}"
    planned = run("plan", str(recipe), kind)
    assert "gained attention: 4 heads" in planned.stdout, planned.stderr
    two = [kind, "parallel.tensor=2", "checkpoint.interval=2", "training.steps=4"]
    two += ["optimizer.schedule.warmup_steps=1"]
    calls = (["train", str(recipe), *steps] for steps in ([*two, "training.steps=2"], two))
    launch(2, "tests.parallel.toy_kind", *calls)
    losses = [
        entry["train/loss"] for entry in read_metrics(tmp_path / "run") if "train/loss" in entry
    ]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    newest = tmp_path / "run/checkpoints/step_00000004"
    # This process has not registered the kind, so it cannot load the checkpoint's recipe. Read only
    # the tensors.
    tensors = ShardedReader(newest, [file.name for file in newest.glob("*.safetensors")])
    gains = tensors.read_tensor("weight", GAINS)
    assert gains.shape == (4,)
    assert (gains != 1).all(), "each rank must train and save the gains of its heads"
    exported = run("export", str(newest), str(tmp_path / "hf"))
    assert exported.returncode == 2
    assert "'gained' cannot be exported: no export is registered" in exported.stderr
    assert not (tmp_path / "hf").exists()
