"""A run takes measured kernels, records them, and keeps them when it resumes."""

import shutil

import pytest

from diffmegatron.checkpoint.checkpoint_format import read_recipe
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.attention_backend import attention_shape
from diffmegatron.config.load import load_resolved
from diffmegatron.measurements.cache import cache_file, write_measurements
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import Measurements
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train
from tests.unit.measurements.test_cache import measurement, right

SHORT = ("training.steps=4", "checkpoint.interval=2", "training.eval_batches=0")


@pytest.fixture
def measure(tmp_path, monkeypatch, tiny_recipe):
    """Return a function that stores times of the tiny recipe's backends, by name, in seconds."""
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path / "cache"))
    recipe = tiny_recipe()
    shape = attention_shape(recipe, recipe.model.attention.kinds[0])

    def store(**seconds: float) -> None:
        machine = this_machine()
        tried = (right(name, each) for name, each in seconds.items())
        found = Measurements(machine=machine, kernels=(measurement(*tried, shape=shape),))
        write_measurements(cache_file(machine), found)

    return store


def losses(run_dir) -> list[float]:
    return [entry["train/loss"] for entry in read_metrics(run_dir) if "train/loss" in entry]


def test_a_run_records_measured_kernels_and_keeps_them(tiny_recipe, tmp_path, measure, capsys):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    measure(sdpa_4call=1e-3, blocked=2e-3)
    assert train(tiny_recipe(*SHORT, f"run_dir={whole}"))
    assert "attention of diff_v1: sdpa_4call (fastest of 2 right backends, measured " in (
        capsys.readouterr().out
    )
    for recipe in (
        load_resolved(whole / "recipe.yaml"),
        read_recipe(CheckpointStore(whole).latest()),
    ):
        kernels = recipe.training.chosen_kernels
        assert kernels is not None and kernels.device == "cpu"
        assert kernels.kinds[0].attention == "sdpa_4call"
        assert this_machine().digest in kernels.kinds[0].origin
    shutil.copytree(whole, parted)
    shutil.rmtree(parted / "checkpoints/step_00000004")
    measure(sdpa_4call=2e-3, blocked=1e-3)
    assert train(tiny_recipe(*SHORT, f"run_dir={parted}"))
    assert "attention of" not in capsys.readouterr().out
    assert losses(parted) == losses(whole)
    kept = read_recipe(CheckpointStore(parted).latest()).training.chosen_kernels
    assert kept is not None and kept.kinds[0].attention == "sdpa_4call"
    assert train(tiny_recipe(*SHORT, f"run_dir={tmp_path / 'other'}"))
    assert "attention of diff_v1: blocked (fastest of 2 " in capsys.readouterr().out
