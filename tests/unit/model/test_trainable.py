"""Training of selected tensors and rows, compared with torch's AdamW; and LoRA layers."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_format import WEIGHT, Checkpoint, open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import check_recipe
from diffmegatron.config.model_config import LoraConfig
from diffmegatron.config.tensors import network_tensors
from diffmegatron.config.trainable_patterns import trained_parts
from diffmegatron.errors import UserError
from diffmegatron.hf.export_checkpoint import export_checkpoint, merged_weights
from diffmegatron.model.accounting.flops import count_flops, frozen_matrices
from diffmegatron.model.accounting.memory import rank_parameters, trained_parameters
from diffmegatron.model.accounting.parameters import count_parameters, count_trained
from diffmegatron.model.build import build_model, transformer_config
from diffmegatron.model.layers.lora import LoraColumnParallelLinear, LoraRowParallelLinear
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.plan.rehearse import small_recipe
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import summed_loss
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

# Overrides that train attention's projections, except the rows of queries and of the gate in
# ``linear_qkv``, and two lambda vectors per layer. The projections have weight decay. The vectors
# have none.
PART = (
    "optimizer.trainable=['*.linear_qkv.weight:[kv]', '*.linear_proj.weight', '*.lambda_q?']",
    "optimizer.lr_multipliers={'*.lambda_*': 5, '*.1.*.linear_*': 0.5}",
    "model.attention.output_gate=elementwise",
)
LORA = "model.lora={rank: 4, alpha: 8}"
# Kind and number of rows of ``linear_qkv`` for one key-value head of the tiny recipe (d = 8), in
# order. The first map has two query heads, half of the gate's logits, a key head and half of the
# value. The second map has the same numbers of rows.
ROWS = [("q", 16), ("g", 16), ("k", 8), ("v", 8)] * 2


def last(run_dir: Path | str) -> Checkpoint:
    return open_checkpoint(CheckpointStore(Path(run_dir)).latest())


def frozen_rows() -> Tensor:
    """Return a mask [192] of the rows of ``linear_qkv``, true for queries and the gate's logits."""
    return torch.cat([torch.full((count,), kind in "qg") for kind, count in ROWS]).repeat(2)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.tied_embeddings=true"],
        ["model.baseline=true", LORA],
        ["model.attention.kind=diff_v2", "model.lora={rank: 2, alpha: 1, targets: [linear_fc1]}"],
        ["model.attention.kind=grouped", "model.attention.num_kv_heads=1"],
    ],
)
def test_the_names_and_shapes_are_those_of_the_built_network(overrides, tiny_recipe):
    recipe = tiny_recipe(*overrides, "training.precision=bf16")
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        shards = {
            shard.name: (shard.global_shape, parameter.dtype == torch.float32)
            for parameter, found in parameter_shards(network).items()
            for shard in found
        }
    named = {
        tensor.name: (tensor.shape, tensor.float32) for tensor in network_tensors(recipe.model)
    }
    assert named == shards
    assert sum(rank_parameters(recipe, 0)) == count_parameters(recipe.model).total


def reference(recipe) -> dict[str, Tensor]:
    """Train the rows that ``PART`` selects with torch's AdamW, and return all weights by name.

    The network computes gradients of all tensors. The selected rows of each tensor are copied into
    a leaf, and the optimizer updates only the leaves.
    """
    everything = {"trainable": None, "lr_multipliers": {}}
    whole = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update=everything)})
    frozen = frozen_rows()
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(whole, parallel_state)
        named = {found[0].name: p for p, found in parameter_shards(network).items()}
        factors = {
            name: 5.0 if "lambda" in name else 0.5 if "layers.1." in name else 1.0
            for name in named
            if re.search(r"linear_qkv|linear_proj|lambda_q", name)
        }
        rows = {name: ~frozen if "qkv" in name else slice(None) for name in factors}
        leaves = {name: named[name].detach()[rows[name]].clone() for name in factors}
        optimizer = torch.optim.AdamW(
            [
                {"params": [leaf], "weight_decay": 0.0 if "lambda" in name else 0.1, "name": name}
                for name, leaf in leaves.items()
            ],
            betas=recipe.optimizer.betas,
            eps=recipe.optimizer.eps,
        )
        loader = open_loader(recipe, parallel_state, "train")
        for step in range(1, recipe.training.total_steps + 1):
            network.zero_grad()
            batches = on_this_rank(next(loader), parallel_state)
            count = sum(batch.loss_mask.sum() for batch in batches)
            for batch in batches:
                (summed_loss(network, batch) / count).backward()
            for name, leaf in leaves.items():
                leaf.grad = named[name].grad[rows[name]].clone()
            torch.nn.utils.clip_grad_norm_(leaves.values(), recipe.optimizer.clip_grad_norm)
            rate = learning_rate(step, recipe.training.total_steps, recipe.optimizer)
            for group in optimizer.param_groups:
                group["lr"] = rate * factors[group["name"]]
            optimizer.step()
            for name, leaf in leaves.items():
                named[name].data[rows[name]] = leaf
        return {name: parameter.detach().clone() for name, parameter in named.items()}


def test_a_trained_part_matches_torchs_adamw(tiny_recipe):
    clipped = "optimizer.clip_grad_norm=0.1"
    recipe = tiny_recipe(*PART, clipped, "training.steps=5", "optimizer.weight_decay=0.1")
    train(recipe)
    tensors, expected = last(recipe.run_dir).tensors, reference(recipe)
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        initial = {
            found[0].name: parameter.detach().clone()
            for parameter, found in parameter_shards(build_model(recipe, parallel_state)).items()
        }
    assert sorted(expected) == sorted(tensors.names())
    for name, value in expected.items():
        trained = tensors.read_tensor(WEIGHT, name)
        torch.testing.assert_close(trained, value, rtol=0, atol=2e-6)
        if "exp_avg" not in tensors.kinds(name):
            assert torch.equal(trained, initial[name]), name
        elif "qkv" in name:
            assert torch.equal(trained[frozen_rows()], initial[name][frozen_rows()])
            assert not torch.equal(trained, initial[name])
    rates = next(entry for entry in read_metrics(Path(recipe.run_dir)) if "train/lr" in entry)
    assert rates["train/lr/*.lambda_*"] == 5 * rates["train/lr"]


def test_frozen_tensors_have_no_gradient_and_no_state_as_planned(tiny_recipe):
    recipe = tiny_recipe(*PART)
    trained = [each for each in network_tensors(recipe.model) if trained_parts(each, recipe)]
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        with_gradient = [p for p in network.parameters() if p.requires_grad]
        with ZeroEngine(network, recipe, parallel_state) as engine:
            held = sum(
                fragment.tensors["exp_avg"].numel()
                for fragment in engine.fragments()
                if "exp_avg" in fragment.tensors
            )
            saved = sum(fragment.tensors["weight"].numel() for fragment in engine.fragments())
    assert held == sum(p.numel() for p in with_gradient) == sum(trained_parameters(recipe, 0))
    assert saved == count_parameters(recipe.model).total == sum(rank_parameters(recipe, 0))
    # Each layer trains two lambda vectors of 8, the keys and values of two key-value heads (32 rows
    # per head), and a square projection. The frozen rows of ``linear_qkv``, 64 of queries and 64 of
    # the gate, also have optimizer state.
    assert len(trained) == 2 * 4
    assert count_trained(recipe) == 2 * (2 * 8 + 2 * 32 * 64 + 64 * 64)
    assert held - count_trained(recipe) == 2 * 128 * 64
    # The frozen matrices are the three of SwiGLU in each layer, and the output layer.
    assert frozen_matrices(recipe) == 2 * 3 * 64 * 96 + 320 * 64
    whole, part = (count_flops(recipe.model, 64, each) for each in (0, frozen_matrices(recipe)))
    assert whole.training - part.training == 2 * frozen_matrices(recipe)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["optimizer.trainable=['*.linear_porj.weight']"],
            "optimizer.trainable has '*.linear_porj.weight', which matches no tensor; the nearest "
            "is 'decoder.layers.*.self_attention.linear_proj.weight'",
        ),
        (
            ["optimizer.trainable=['*.linear_qkv.weight:o']"],
            "which matches no tensor; the nearest is "
            "'decoder.layers.*.self_attention.linear_qkv.weight:",
        ),
        (
            ["model.baseline=true", "optimizer.trainable=['*.mlp.*', '*.lambda_q3']"],
            "optimizer.trainable has '*.lambda_q3', which matches no tensor",
        ),
        (
            ["model.baseline=true", "optimizer.trainable=['*.lambda_q1']"],
            "optimizer.trainable is [], which freezes every tensor",
        ),
        (["optimizer.trainable=[]"], "optimizer.trainable is [], which freezes every tensor"),
        (
            ["optimizer.trainable=['output_*']", "parallel.pipeline=2"],
            "leaves stage 1 of parallel.pipeline 2 nothing to train",
        ),
        (
            ["optimizer.trainable=['*.mlp.*']", "optimizer.lr_multipliers={'*norm*': 2}"],
            "optimizer.lr_multipliers has '*norm*', which matches no tensor that is trained",
        ),
        (
            ["optimizer.lr_multipliers={'*.mlp.*': 2, '*.linear_fc1.*': 3}"],
            "'*.mlp.*' and '*.linear_fc1.*', and decoder.layers.0.mlp.linear_fc1.weight matches",
        ),
        (["optimizer.lr_multipliers={'*': 0}"], "greater than 0"),
        (["model.num_layers=2000", "optimizer.trainable=['*']"], "more than the 1024 layers"),
        (["model.lora={rank: 4, alpha: 8, targets: []}"], "model.lora.targets is []"),
        (["model.lora={rank: 4, alpha: 8, targets: [linear_o]}"], "linear_qkv"),
    ],
)
def test_invalid_selections_of_trained_tensors_are_errors(overrides, sentence, tiny_recipe):
    with pytest.raises(UserError) as caught:
        tiny_recipe(*overrides)
    assert sentence in str(caught.value)


def test_a_baseline_drops_patterns_of_tensors_that_it_lacks(tiny_recipe):
    patterns = "optimizer.trainable=['*.lambda_?1', '*.linear_qkv.weight:[kv]', '*.self_*.*']"
    factors = "optimizer.lr_multipliers={'*.lambda_q1': 5, '*.linear_qkv.*': 2}"
    recipe = tiny_recipe(patterns, factors, "model.baseline=true")
    assert recipe.optimizer.trainable == ("*.linear_qkv.weight:[kv]", "*.self_*.*")
    assert recipe.optimizer.lr_multipliers == {"*.linear_qkv.*": 2}
    assert check_recipe(recipe.model_dump(mode="json"), "saved").optimizer == recipe.optimizer
    whole = tiny_recipe("model.baseline=true", "optimizer.lr_multipliers={'*.lambda_*': 5}")
    assert whole.optimizer.trainable is None
    assert whole.optimizer.lr_multipliers == {}
    with pytest.raises(UserError, match=r"lr_multipliers has '\*\.lambda_x', which matches no"):
        tiny_recipe("model.baseline=true", "optimizer.lr_multipliers={'*.lambda_x': 5}")


def test_a_rehearsal_trains_the_same_of_fewer_layers(tiny_recipe, tmp_path):
    patterns = "optimizer.trainable=['decoder.layers.2[0-9].mlp.*', '*.3?.*.linear_qkv.weight:k']"
    recipe = tiny_recipe("model.num_layers=40", patterns)
    with pytest.raises(UserError, match="matches no tensor"):
        tiny_recipe("model.num_layers=20", patterns)
    small = small_recipe(recipe, None, tmp_path).recipe
    assert small.optimizer.trainable == (
        "decoder.layers.*.mlp.linear_fc1.weight",
        "decoder.layers.*.mlp.linear_fc2.weight",
        "decoder.layers.*.self_attention.linear_qkv.weight:k",
    )


@pytest.fixture
def ranks_of_one(tiny_recipe):
    recipe = tiny_recipe(LORA)
    with process_groups(recipe.parallel, seed=1):
        config = transformer_config(recipe)
        config.params_dtype = torch.float64
        yield config


@pytest.mark.parametrize("kind", [LoraColumnParallelLinear, LoraRowParallelLinear])
def test_a_lora_layer_and_its_gradients_match_the_equation(kind, ranks_of_one):
    torch.manual_seed(0)
    more = {"input_is_parallel": True} if kind is LoraRowParallelLinear else {}
    layer = kind(
        12,
        20,
        config=ranks_of_one,
        init_method=torch.nn.init.zeros_,
        bias=False,
        skip_bias_add=True,
        lora=LoraConfig(rank=3, alpha=6.0),
        **more,
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.weight.requires_grad_(False)
    x = torch.randn(5, 2, 12, dtype=torch.float64, requires_grad=True)
    leaves = [x, layer.lora_a, layer.lora_b]
    weight, (own, a, b) = layer.weight, (each.detach().clone().requires_grad_() for each in leaves)
    expected = own @ (weight + 6.0 / 3 * b @ a).T
    out, _ = layer(x)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    for ours, theirs in zip(leaves, (own, a, b), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)
    assert layer.weight.grad is None


def test_lora_starts_as_the_model_it_adapts_and_is_merged_on_export(tiny_recipe, tmp_path):
    base, adapted = tmp_path / "base", tmp_path / "adapted"
    train(tiny_recipe(f"run_dir={base}", "training.steps=3"))
    overrides = [LORA, f"checkpoint.start_from={base}", "training.steps=4", "optimizer.lr=3e-2"]
    train(tiny_recipe(f"run_dir={adapted}", *overrides))
    held_out = [
        [e["valid/loss"] for e in read_metrics(run) if "valid/loss" in e] for run in (base, adapted)
    ]
    assert held_out[1][0] == held_out[0][-1]
    assert held_out[1][-1] < held_out[1][0] - 0.01
    before, after = last(base).tensors, last(adapted)
    merged = dict(merged_weights(after))
    assert sorted(merged) == sorted(before.names())
    for name in before.names():
        assert torch.equal(
            after.tensors.read_tensor(WEIGHT, name), before.read_tensor(WEIGHT, name)
        ), name
        is_projection = ".linear_" in name
        assert torch.equal(merged[name], before.read_tensor(WEIGHT, name)) != is_projection, name
    difference = export_checkpoint(after.directory, tmp_path / "hf")
    assert difference.relative < 1e-5
