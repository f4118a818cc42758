"""Networks with several kinds of attention: recipe, parameters, plan, export, attention maps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import check_can_start_from
from diffmegatron.config.tensors import network_tensors, stage_kinds
from diffmegatron.errors import UserError
from diffmegatron.evaluation.captured_attention import LayerAttention, watch_attention
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.targets import find_targets
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.hf.import_model import import_model
from diffmegatron.hf.kinds import NetworkExport
from diffmegatron.model.accounting.flops import count_flops
from diffmegatron.model.accounting.memory import rank_parameters
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.plan.rehearse import small_recipe
from diffmegatron.plan.summary import plan_recipe
from diffmegatron.training.trainer import train
from tests.conftest import TINY

LAMBDA_INIT = 0.4
V1 = (
    "{kind: diff_v1, num_heads: 2, num_kv_heads: 1, qk_norm: true, output_gate: elementwise, "
    f"lambda_init: {{policy: constant, value: {LAMBDA_INIT}}}, layers: 3-4}}"
)
V2 = (
    "{kind: diff_v2, num_heads: 4, num_kv_heads: 2, qk_norm: true, output_gate: headwise, "
    "layers: 1}"
)
TRANSFORMER = "{kind: softmax, num_heads: 4, num_kv_heads: 2}"
# Layer 1 has DIFF V2's attention. Layer 2 has the Transformer's. Layers 3 and 4 have DIFF V1's.
LIST = f"model.attention=[{V1}, {V2}, {TRANSFORMER}]"
FOUR = "model.num_layers=4"


@pytest.fixture
def pattern_recipe(tiny_recipe):
    def make(*overrides: str) -> Recipe:
        return tiny_recipe(FOUR, LIST, *overrides)

    return make


# The recipe section


def test_every_layer_has_the_kind_of_its_entry(pattern_recipe):
    attention = pattern_recipe().model.attention
    kinds = [attention.of_layer(layer).kind for layer in range(4)]
    assert kinds == ["diff_v2", "softmax", "diff_v1", "diff_v1"]
    by_kind = {kind.kind: layers for kind, layers in attention.by_kind(4)}
    assert by_kind == {
        "diff_v1": (range(2, 4),),
        "diff_v2": (range(0, 1),),
        "softmax": (range(1, 2),),
    }


def test_a_list_of_one_kind_equals_the_kind_alone(tiny_recipe):
    listed = tiny_recipe("model.attention=[{kind: diff_v1, num_heads: 4, num_kv_heads: 2}]")
    assert listed.model == tiny_recipe().model


def test_a_dumped_list_of_kinds_loads_to_the_same_recipe(pattern_recipe):
    recipe = pattern_recipe()
    dumped = recipe.model_dump(mode="json")
    assert [each.get("layers") for each in dumped["model"]["attention"]] == ["3-4", "1", None]
    assert Recipe.model_validate(json.loads(json.dumps(dumped))) == recipe


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ("[]", "is an empty list"),
        (f"[{V1}, {V2}]", "names no kind for layer 2; leave layers out of one entry"),
        (f"[{TRANSFORMER}, {TRANSFORMER}]", "has 2 entries without layers"),
        (f"[{V1}, {{kind: softmax, num_heads: 4, layers: 4-5}}]", "num_layers is 4"),
        (f"[{V1}, {{kind: softmax, num_heads: 4, layers: 1-3}}]", "another entry names some"),
        (f"[{{kind: softmax, num_heads: 4, layers: 1-4}}, {V2}]", "another entry names some"),
        (f"[{{kind: softmax, num_heads: 4, layers: 1-4}}, {TRANSFORMER}]", "is left with none"),
        (f"[{TRANSFORMER}, {{kind: diff_v1, num_heads: 2, layers: 2-1}}]", "the smaller first"),
        (f"[{TRANSFORMER}, {{kind: diff_v1, num_heads: 2, layers: top}}]", "such as 3, '5-8'"),
        (f"[{TRANSFORMER}, {{kind: diff_v1, num_heads: 4, layers: 1}}]", "head_dim 8, 16; all"),
        (
            f"[{TRANSFORMER}, {{kind: diff_v1, num_haeds: 2, layers: 1}}]",
            "did you mean 'num_heads'",
        ),
        (
            f"[{TRANSFORMER}, {{kind: dex, num_heads: 4, annealing_steps: 1, "
            "selected_heads: [[0]], layers: 1}]",
            "kind 'dex' in a list, which needs all layers",
        ),
        (f"[{TRANSFORMER}, 7]", "it takes a mapping with a kind"),
    ],
)
def test_a_wrong_list_of_kinds_is_refused(tiny_recipe, entries, sentence):
    with pytest.raises(UserError, match=sentence):
        tiny_recipe(FOUR, f"model.attention={entries}")


def test_the_layout_must_divide_the_key_value_heads_of_every_kind(pattern_recipe):
    with pytest.raises(UserError, match="num_kv_heads 1 is not a multiple"):
        pattern_recipe("parallel.tensor=2")


def test_equal_baselines_of_all_kinds_become_one_transformer(tiny_recipe):
    same = f"[{{kind: diff_v1, num_heads: 2, num_kv_heads: 1, layers: 1-2}}, {TRANSFORMER}]"
    baseline = tiny_recipe(FOUR, f"model.attention={same}", "model.baseline=true").model
    transformer = Softmax(num_heads=4, num_kv_heads=2, head_dim=16)
    assert baseline.attention == LayerKinds(kinds=(transformer,))
    other = tiny_recipe(FOUR, LIST.replace("num_heads: 4, num_kv_heads: 2}", "num_heads: 4}"))
    baseline = other.model.attention.baseline()
    assert [kind.kind for kind in baseline.kinds] == ["softmax"] * 3


def test_a_run_starts_only_from_the_same_kinds_of_layers(pattern_recipe, tiny_recipe):
    check_can_start_from(pattern_recipe(), "the first", pattern_recipe(), "the second")
    moved = tiny_recipe(FOUR, LIST.replace("layers: 3-4", "layers: 2-3"))
    with pytest.raises(UserError, match=r"\[2-3\].kind None and the second has 'diff_v1'"):
        check_can_start_from(pattern_recipe(), "the first", moved, "the second")


def test_a_rehearsal_has_every_kind(pattern_recipe, tmp_path):
    small = small_recipe(pattern_recipe("parallel.pipeline=4"), 4, tmp_path).recipe.model
    kinds = {small.attention.of_layer(layer).kind for layer in range(small.num_layers)}
    assert kinds == {"diff_v1", "diff_v2", "softmax"}


# The network and its plan


def test_plan_counts_the_parameters_of_the_network(pattern_recipe):
    recipe = pattern_recipe()
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        built = {
            shard.name: shard.global_shape
            for shards in parameter_shards(network).values()
            for shard in shards
        }
        counted = sum(parameter.numel() for parameter in network.parameters())
        lambdas = network.lambda_by_layer()
    assert built == {tensor.name: tensor.shape for tensor in network_tensors(recipe.model)}
    assert plan_recipe(recipe).parameters.total == counted
    assert sum(rank_parameters(recipe, 0)) == counted
    # V2's lambda depends on the token, so it exists only after a forward pass. The Transformer has
    # no lambda.
    assert sorted(lambdas) == [3, 4]
    assert all(abs(each.item() - LAMBDA_INIT) < 0.2 for each in lambdas.values())


def test_flops_are_the_sum_over_the_layers(pattern_recipe, tiny_recipe):
    def per_layer(attention: str) -> float:
        alone = f"model.attention=[{attention}]"
        four, eight = (
            count_flops(tiny_recipe(f"model.num_layers={count}", alone).model, 64).training
            for count in (4, 8)
        )
        return (eight - four) / 4

    everywhere = [text.replace(", layers: 3-4", "").replace(", layers: 1", "") for text in (V1, V2)]
    v1, v2 = map(per_layer, everywhere)
    transformer = per_layer(TRANSFORMER)
    uniform = count_flops(tiny_recipe(FOUR, f"model.attention=[{TRANSFORMER}]").model, 64).training
    expected = uniform + 2 * (v1 - transformer) + (v2 - transformer)
    assert count_flops(pattern_recipe().model, 64).training == pytest.approx(expected)


def test_interleaved_stages_have_their_layers(pattern_recipe):
    recipe = pattern_recipe("parallel.pipeline=2", "parallel.virtual_pipeline=2")
    found = [{kind.kind: count for kind, count in stage_kinds(recipe, stage)} for stage in range(2)]
    assert found == [{"diff_v2": 1, "diff_v1": 1}, {"softmax": 1, "diff_v1": 1}]
    assert sum(sum(rank_parameters(recipe, stage)) for stage in range(2)) == (
        count_parameters(recipe.model).total
    )


# Export, import and evaluation


@pytest.fixture(scope="module")
def exported(corpus, tmp_path_factory) -> tuple[Path, Path]:
    """Train four steps and export the result; return the checkpoint and the exported folder."""
    folder = tmp_path_factory.mktemp("pattern")
    (folder / "tiny.yaml").write_text(TINY.format(run_dir=folder / "run", corpus=corpus))
    train(load_recipe(folder / "tiny.yaml", [FOUR, LIST, "training.steps=4"]))
    checkpoint = folder / "run" / "checkpoints" / "step_00000004"
    difference = export_checkpoint(checkpoint, folder / "hf")
    assert difference is not None and difference.relative < 1e-5
    return checkpoint, folder / "hf"


PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="float32")
print([type(layer.self_attn).__name__ for layer in model.model.layers])
tokens = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(0))
mask, step = torch.ones_like(tokens), tokens
whole = model.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False)
for _ in range(6):
    step = torch.cat([step, model(step).logits[:, -1].argmax(-1, keepdim=True)], 1)
assert torch.equal(whole, step)
assert "diffmegatron" not in sys.modules
"""


def test_plain_transformers_reads_the_export_and_generates_with_a_cache(exported, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(exported[1])],
        cwd=tmp_path,
        env=environment | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    names = ["DiffV2Attention", "LlamaAttention", "GroupedDiffAttention", "GroupedDiffAttention"]
    assert done.stdout.splitlines()[-1] == str(names)


def test_the_export_imports_again(exported, tmp_path):
    difference = import_model(exported[1], tmp_path / "imported")
    assert difference is not None and difference.relative < 1e-5
    imported = open_checkpoint(tmp_path / "imported" / "checkpoints" / "step_00000000")
    attention = imported.recipe.model.attention
    kinds = [attention.of_layer(layer).kind for layer in range(4)]
    # The import reads V1's heads as grouped heads, each with its own noise head.
    assert kinds == ["diff_v2", "softmax", "grouped", "grouped"]


def test_attention_maps_of_every_kind_can_be_watched(exported):
    (target,) = find_targets([exported[1]], exported[1].parent)
    model = Model(target)
    tokens = torch.randint(0, 257, (1, 24), generator=torch.Generator().manual_seed(0))
    shapes, sums = [], []

    def look(layer: LayerAttention) -> None:
        maps = layer.maps(0, 24)
        shapes.append(maps.shape)
        sums.append(maps.sum(-1).mean().item())

    with watch_attention(model, look), torch.no_grad():
        model.network(tokens, use_cache=False)
    assert [shape[0] for shape in shapes] == [4, 4, 2, 2]
    # A row of a Transformer's map sums to 1. A row of a differential map sums to 1 - lambda.
    assert sums[1] == pytest.approx(1, abs=1e-4)
    assert sums[2] == pytest.approx(1 - LAMBDA_INIT, abs=0.2) and sums[2] < 0.9
    assert 0.3 < sums[0] < 0.7


def test_a_list_with_a_kind_without_export_is_refused(tiny_recipe):
    entries = f"[{V2}, {{kind: softmax, num_heads: 4, headwise_norm: true}}]"
    model = tiny_recipe(FOUR, f"model.attention={entries}").model
    with pytest.raises(UserError, match="Hugging Face's Llama never has the headwise norm"):
        NetworkExport(model.attention, model.hidden_size, model.num_layers).hugging_face()
