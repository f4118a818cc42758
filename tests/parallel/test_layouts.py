"""Tests that every parallel layout trains like one process.

The tests compare initial weights, losses, gradients and saved weights.
"""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from subprocess import TimeoutExpired

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.hf.export_checkpoint import export_checkpoint
from tests.conftest import TINY
from tests.parallel.matrix import (
    BEGIN,
    END,
    FP8_LAYOUTS,
    LAYOUTS,
    MODELS,
    PAGE,
    STEPS,
    Z_LOSS,
    Layout,
    gradient_difference,
    loss_difference,
    run_layouts,
    run_models,
    series,
)

# Allowed relative differences of the models in bf16; all other models must be within 1e-5. bf16
# rounds every activation to 2^-9, and layouts sum in different orders. The weights therefore differ
# slightly, and every update increases the effect on the losses.
BF16 = ("bf16", "muon-bf16")
LOSS_TOLERANCE = dict.fromkeys(BF16, 1e-3)
GRADIENT_TOLERANCE = dict.fromkeys(BF16, 2e-2)

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def named(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


def sharing(layout: Layout) -> int:
    """Return the number of ranks that have the same shard of the model and sum its gradients."""
    model = [int(size) for size in re.findall(r"(?:TP|PP)(\d)", layout.words)]
    return layout.ranks // math.prod(model)


def overlaps(layout: Layout) -> bool:
    """Return whether the ranks sum gradients during the backward pass."""
    others = ("PP", "ZeRO 2", "ZeRO 3", "offload")
    return sharing(layout) > 1 and not any(word in layout.words for word in others)


def reductions(run_dir: Path) -> dict:
    return json.loads((run_dir / "reductions.json").read_text())


@pytest.fixture(scope="module")
def models(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train each model in this process, and return the folder of the runs."""
    out = tmp_path_factory.mktemp("layouts")
    file = out / "tiny.yaml"
    file.write_text(TINY.format(run_dir=out / "unused", corpus=corpus))
    run_models(file, out)
    return out


@pytest.fixture(scope="module")
def run(models: Path) -> Callable[[Layout], Path]:
    """Return a function from a layout to the folder of its finished run.

    The first call for a number of ranks trains all layouts with this number in one launch.
    """

    @cache
    def problem_of(ranks: int) -> str | None:
        """Train all layouts of ``ranks`` ranks; return the error, or None.

        The error is cached, because a launch takes minutes and must not be repeated by each test.
        """
        try:
            run_layouts(models / "tiny.yaml", models, ranks)
        except (AssertionError, TimeoutExpired) as problem:
            return str(problem)
        return None

    def folder(layout: Layout) -> Path:
        problem = problem_of(layout.ranks)
        assert problem is None, problem
        return models / layout.name

    return folder


@each_layout
def test_initial_weights_are_the_same_bits(layout, run, models):
    expected = (models / layout.model / "initial.txt").read_text()
    assert (run(layout) / "initial.txt").read_text() == expected


@each_layout
def test_losses_are_the_same(layout, run, models):
    difference = loss_difference(run(layout), models / layout.model)
    assert difference < LOSS_TOLERANCE.get(layout.model, 1e-5)


@each_layout
def test_gathered_gradients_are_the_same(layout, run, models):
    of_all, of_one_parameter = gradient_difference(run(layout), models / layout.model)
    assert of_all < GRADIENT_TOLERANCE.get(layout.model, 1e-5)
    if layout.model not in BF16:
        assert of_one_parameter < 1e-3


@pytest.mark.parametrize(
    "layout",
    [each for each in LAYOUTS if each.model in ("part", "lora", "muon-part")],
    ids=lambda layout: layout.name,
)
def test_gathered_gradients_of_the_second_step_are_the_same(layout, run, models):
    _, of_one_parameter = gradient_difference(run(layout), models / layout.model, step=2)
    assert of_one_parameter < 1e-4


@each_layout
@pytest.mark.parametrize("metric", ["train/grad_norm", "valid/loss"])
def test_gradient_norm_and_held_out_loss_are_the_same(layout, metric, run, models):
    expected = series(models / layout.model, metric)
    assert len(expected) == (STEPS if metric.startswith("train") else 2)
    # A small difference in the weights can change the gradient norm much more, if the loss has a
    # kink near the weights.
    tolerance = 2e-2 if layout.model in BF16 else 1e-4
    assert series(run(layout), metric) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    "layout",
    [each for each in LAYOUTS if set(Z_LOSS) <= set(MODELS[each.model])],
    ids=lambda layout: layout.name,
)
def test_z_losses_are_the_same(layout, run, models):
    expected = series(models / layout.model, "train/z_loss")
    assert len(expected) == STEPS
    assert series(run(layout), "train/z_loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if layout.model not in BF16], ids=lambda each: each.name
)
def test_saved_weights_are_the_same(layout, run, models):
    expected, saved = open_last(models / layout.model), open_last(run(layout))
    for name in expected.names():
        # Adam divides by the size of the gradient. An element whose gradient is only rounding noise
        # may move by a part of the learning rate (3e-3) in either direction.
        torch.testing.assert_close(
            saved.read_tensor("weight", name),
            expected.read_tensor("weight", name),
            rtol=0,
            atol=5e-4,
        )


OVERLAPPING = [layout for layout in LAYOUTS if overlaps(layout)]
each_overlapping = pytest.mark.parametrize("layout", OVERLAPPING, ids=lambda layout: layout.name)


@each_overlapping
def test_overlapped_gradient_sums_give_the_same_weights_to_the_bit(layout, run):
    weights = reductions(run(layout))["weights"]
    assert len(weights["overlapping"]) == layout.ranks
    assert weights["overlapping"] == weights["after"]
    # Compare with DeepSpeed only where the order of additions cannot matter. The sum of two terms,
    # from two ranks, is the same in any order. With more ranks, DeepSpeed adds in another order.
    # With tensor parallelism, gradients are also summed over the tensor-parallel ranks: before the
    # sums over the data-parallel ranks in the way "deepspeed", and after them in the other ways.
    if sharing(layout) == 2 and "parallel.tensor=2" not in layout.overrides:
        assert weights["overlapping"] == weights["deepspeed"]


@each_overlapping
def test_sums_begin_in_the_backward_pass(layout, run):
    events = reductions(run(layout))["events"]
    during, after = events["overlapping"], events["after"]
    assert sorted(during) == sorted(after)
    for late in (after, events["deepspeed"]):
        assert late.endswith("s")
        assert late.rstrip("s").count("s") == 0
    # The sums of the embedding, which gets its gradient last, and of the first layer may begin
    # after the last gradient. The other sums, more than half, must begin earlier.
    assert during.rstrip("s").count("s") > during.count("s") / 2


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bf16_keeps_lambda_in_float32_under_every_zero_stage(zero, run, models):
    folder = run(named(f"bf16:dp2-zero-{zero}"))
    tensors = open_checkpoint(folder / "checkpoints" / "step_00000001").tensors
    value = tensors.read_tensor("weight", "decoder.layers.0.self_attention.lambda_q1")
    assert not torch.equal(value, value.bfloat16().float())
    metric = "attn/lambda_layer_01"
    # If the four lambda vectors were rounded to bf16, lambda would differ by at least 1e-3.
    assert series(folder, metric)[0] == pytest.approx(series(models / "bf16", metric)[0], abs=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "gqa:tp2+spxdp2-zero-3",
        "tied:tp2xpp2",
        "deep:tp2xpp2-interleavedxcp2-ring",
        "v2:tp2+spxcp2-ringxdp2-zero-3",
        "v2-deep:pp2-interleaved",
        "grouped:tp2+spxcp2-ringxdp2-zero-3",
        "part:tp2+spxdp2-zero-3",
        "lora:tp2+spxpp2",
        "pattern:pp2-interleaved",
    ],
)
def test_any_layout_exports(name, run, tmp_path):
    latest = CheckpointStore(run(named(name))).latest()
    difference = export_checkpoint(latest, tmp_path / "hf")
    assert difference.relative < 1e-5


@pytest.mark.parametrize(
    "name",
    ["deep:pp2-interleaved", "deep:tp2+spxpp2-interleaved", "v2-deep:pp2-interleaved"],
)
@pytest.mark.parametrize("layer", [1, 2, 3, 4])
def test_lambda_is_logged_for_every_layer_of_every_chunk(layer, name, run, models):
    metric = f"attn/lambda_layer_{layer:02d}"
    expected = series(models / named(name).model, metric)
    assert len(expected) == STEPS
    assert series(run(named(name)), metric) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["v2:tp2", "v2:tp2+sp"])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_lambda_of_tokens_and_heads_is_logged_as_the_mean_of_all_heads(layer, name, run, models):
    metric = f"attn/lambda_layer_{layer:02d}"
    expected = series(models / "v2", metric)
    assert len(expected) == STEPS
    assert max(expected) - min(expected) > 1e-2
    assert series(run(named(name)), metric) == pytest.approx(expected, abs=1e-4)


# In these layouts, the first microbatches of all ranks have the sequences of the one process.
@pytest.mark.parametrize("name", ["v2:tp2", "v2-deep:pp2-interleaved", "gqa:pp2"])
def test_the_largest_logit_of_every_map_is_logged(name, run, models):
    layers = 4 if "deep" in name else 2
    for metric in ("attn/max_logit", "attn/max_noise_logit"):
        for layer in range(1, layers + 1):
            expected = series(models / named(name).model, f"{metric}_layer_{layer:02d}")
            assert len(expected) == 1  # that of the last step
            found = series(run(named(name)), f"{metric}_layer_{layer:02d}")
            assert found == pytest.approx(expected, abs=1e-4)


def test_the_matrix_reaches_every_model_and_size():
    assert {layout.model for layout in LAYOUTS} == set(MODELS)
    assert {layout.ranks for layout in LAYOUTS} == {2, 4, 8}


def test_the_docs_show_every_layout():
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [
        f"| {layout.words} | {layout.model} | {layout.ranks} | same"
        for layout in (*LAYOUTS, *FP8_LAYOUTS)
    ]
    assert [row for row in rows if row not in shown] == []
    assert len(shown.strip().splitlines()) == len(rows) + 2


def open_last(run_dir: Path):
    return open_checkpoint(CheckpointStore(run_dir).latest()).tensors
