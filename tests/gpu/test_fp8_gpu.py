"""Tests that a GPU's products in FP8 train like bf16.

The tests have not run yet, because they were written on a machine without a GPU.
"""

import pytest
import torch

from diffmegatron.config.load import load_recipe
from diffmegatron.model.layers.fp8 import fp8_problem
from diffmegatron.training.trainer import train
from tests.conftest import TINY
from tests.parallel.matrix import series
from tests.transformer_engine.fp8_runs import RECIPES, SIZES, in_fp8, recompute

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"
)


@pytest.fixture(scope="module")
def losses(corpus, tmp_path_factory):
    """Return a function that trains 20 steps with overrides and returns their losses."""
    out = tmp_path_factory.mktemp("fp8")
    file = out / "tiny.yaml"
    file.write_text(TINY.format(run_dir="unused", corpus=corpus))

    def run(name: str, *overrides: str) -> list[float]:
        if not (out / name).exists():
            train(load_recipe(file, [*SIZES, *overrides, f"run_dir={out}/{name}"]))
        return series(out / name, "train/loss")

    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_twenty_losses_in_fp8_are_those_of_bf16_within_a_percent(recipe, losses):
    if (problem := fp8_problem(recipe)) is not None:
        pytest.skip(problem)
    expected = losses("bf16")
    found = losses(recipe, in_fp8(recipe))
    assert found == pytest.approx(expected, rel=0.01)
    assert found != expected
    recomputed = losses(f"{recipe}, recomputed", in_fp8(recipe), recompute(1))
    assert recomputed == pytest.approx(found, rel=1e-3)
