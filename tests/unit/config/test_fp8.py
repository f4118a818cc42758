"""Tests of ``training.fp8`` in a recipe: refusals, and the estimates of plan."""

import re

import pytest

from diffmegatron.config.fp8_products import fp8_layers, fp8_matrices
from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import Measurements
from diffmegatron.model.accounting.memory import memory_by_stage
from diffmegatron.model.layers.fp8 import begin_fp8
from diffmegatron.plan.rates import Hardware
from diffmegatron.plan.summary import plan_recipe
from diffmegatron.plan.timing import estimate_time
from diffmegatron.training.saving.resume import lost_scales
from diffmegatron.tuning.tables import print_tuned
from diffmegatron.tuning.tune import Tuned
from tests.paths import ROOT

RECIPE = ROOT / "configs/at_scale/diff_3b_fp8_64gpus.yaml"
LAYERS = "training.fp8.{}_layers_bf16={}"


def load(*overrides: str):
    return load_recipe(RECIPE, overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ("training.precision=fp32", "training.precision 'fp32'"),
        ("model.lora={rank: 8, alpha: 16}", "model.lora"),
        ("parallel.zero_stage=3", "parallel.zero_stage 3"),
        ("training.offload_activations=true", "training.offload_activations"),
        ("training.fp8.recipe=delayed", "training.fp8.recipe 'delayed' updates"),
        (f"{LAYERS.format('first', 14)} {LAYERS.format('last', 14)}", "none of the 28 layers"),
        (f"{LAYERS.format('last', 8)} parallel.pipeline=4", "more than the 7 layers of a pipeline"),
        ("training.fp8.recipe=e4m3", "training.fp8.recipe"),
    ],
)
def test_what_does_not_work_with_fp8_is_refused(overrides, words):
    parts = re.split(r" (?=[a-z_]+\.)", overrides)
    with pytest.raises(UserError, match=re.escape(words)):
        load(*parts)


# Sizes that the quantizers of Transformer Engine and cuBLAS's FP8 products accept.
MULTIPLES = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}


@pytest.mark.parametrize("recipe", MULTIPLES)
def test_every_dimension_of_a_product_is_a_multiple(recipe):
    """Change one dimension by half of the multiple; all other dimensions keep their multiples."""
    multiple = MULTIPLES[recipe]
    fp8 = f"training.fp8={{recipe: {recipe}, first_layers_bf16: 0, last_layers_bf16: 0}}"
    assert load(fp8).training.fp8.recipe == recipe
    half = multiple // 2
    for key, size, words in (
        ("model.ffn_hidden_size", 8192 + half, "model.ffn_hidden_size / parallel.tensor"),
        ("training.seq_length", 4096 + half, "training.micro_batch_size x seq_length"),
    ):
        with pytest.raises(UserError, match=re.escape(words)) as error:
            load(fp8, f"{key}={size}", "training.micro_batch_size=1", "parallel.tensor=1")
        assert f"multiples of {multiple}, and {words}" in str(error.value)
    words = f"x seq_length / parallel.context / parallel.tensor is {half}"
    with pytest.raises(UserError, match=words):
        load(
            fp8, f"training.seq_length={2 * multiple}", "training.micro_batch_size=1",
            "parallel.tensor=4", "parallel.sequence_parallel=true",
        )  # fmt: skip


def test_the_layers_in_fp8_are_counted_by_stage():
    recipe = load("parallel.pipeline=4", "parallel.virtual_pipeline=7", LAYERS.format("last", 3))
    # One layer is a virtual stage: stage 0 has layers 0, 4, ..., 24.
    assert [fp8_layers(recipe, stage) for stage in range(4)] == [6, 6, 6, 6]
    recipe = load("parallel.pipeline=4", LAYERS.format("last", 3))
    assert [fp8_layers(recipe, stage) for stage in range(4)] == [6, 7, 7, 4]


def test_plan_counts_copies_smaller_inputs_and_faster_products():
    fp8, bf16 = load(), load("training.fp8=null")
    hidden, ffn = fp8.model.hidden_size, fp8.model.ffn_hidden_size
    # DIFF V1 without grouped heads: q, k, v and the output projection have hidden channels.
    matrices = 26 * (4 * hidden**2 + 3 * hidden * ffn)
    assert fp8_matrices(fp8, 0) == matrices
    ours, theirs = (memory_by_stage(each, 64)[0] for each in (fp8, bf16))
    assert ours.weights - theirs.weights == 2 * matrices
    tokens = fp8.training.micro_batch_size * fp8.training.seq_length
    assert theirs.activations - ours.activations == 26 * tokens * (3 * hidden + ffn)
    assert (ours.gradients, ours.optimizer) == (theirs.gradients, theirs.optimizer)
    faster, slower = (estimate_time(each, 64, Hardware("H100")) for each in (fp8, bf16))
    assert 0.5 < faster.compute / slower.compute < 0.9
    assert faster.communication == pytest.approx(slower.communication, rel=0.2)


@pytest.mark.parametrize(
    ("trained", "inputs"),
    [("mlp.linear_fc2", "ffn"), ("mlp.linear_fc1", "hidden"), ("linear_qkv", "hidden")],
)
def test_plan_counts_no_smaller_input_of_a_frozen_matrix(trained, inputs):
    only = f"optimizer.trainable=['*.{trained}.weight']"
    fp8, bf16 = load(only), load(only, "training.fp8=null")
    channels = {"ffn": fp8.model.ffn_hidden_size, "hidden": fp8.model.hidden_size}[inputs]
    tokens = fp8.training.micro_batch_size * fp8.training.seq_length
    ours, theirs = (memory_by_stage(each, 64)[0] for each in (fp8, bf16))
    assert theirs.activations - ours.activations == 26 * tokens * channels


def test_plan_warns_of_a_gpu_of_an_earlier_generation():
    # From Transformer Engine's release notes: Ada, Hopper and Blackwell.
    known = ("A100", "H100", "B200")
    lacking = {
        recipe: [
            gpu
            for gpu in known
            if any("compute capability" in each for each in plan(recipe, gpu).warnings)
        ]
        for recipe in MULTIPLES
    }
    assert lacking == {
        "tensorwise": ["A100"], "delayed": ["A100"], "blockwise": ["A100"],
        "mxfp8": ["A100", "H100"],
    }  # fmt: skip


def plan(recipe: str, gpu: str):
    fp8 = f"training.fp8={{recipe: {recipe}, first_layers_bf16: 0, last_layers_bf16: 0}}"
    return plan_recipe(load(fp8), 64, gpu)


def test_a_machine_without_transformer_engine_is_refused():
    with pytest.raises(UserError, match="needs Transformer Engine and a GPU"):
        begin_fp8("tensorwise")


def test_a_resumed_run_warns_that_delayed_scales_begin_again():
    delayed = load("training.fp8={recipe: delayed, first_layers_bf16: 0, last_layers_bf16: 0}")
    assert "begin at 1" in lost_scales(delayed)
    assert lost_scales(load()) is None
    assert lost_scales(load("training.fp8=null")) is None


def test_tune_estimates_no_step_in_fp8(capsys):
    print_tuned(Tuned(Measurements(machine=this_machine()), None), [load()], 64)
    assert "because products in FP8 are not measured" in capsys.readouterr().out
