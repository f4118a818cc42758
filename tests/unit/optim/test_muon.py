"""Muon's updates compared with torch's Muon on separate matrices, and with float64."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffmegatron.attention.kinds.two_maps import split_maps
from diffmegatron.checkpoint.checkpoint_format import WEIGHT, open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.muon_matrices import deal
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.newton_schulz import COEFFICIENTS, orthogonalize
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import summed_loss
from diffmegatron.training.trainer import train

SHAPES = [(3, 24, 40), (2, 40, 24), (1, 16, 16)]


def random_matrices(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def in_float64(matrix: Tensor, coefficients=COEFFICIENTS, steps: int = 5, eps: float = 0) -> Tensor:
    """Return Newton-Schulz iterations of a matrix from its singular values in float64.

    The arguments are those of torch's function, which it replaces in the reference below.
    """
    exact = matrix.double()
    u, s, vh = torch.linalg.svd(exact / exact.norm(), full_matrices=False)
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return (u @ s.diag() @ vh).float()


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_follow_the_polynomial_in_float64(shape):
    matrices = random_matrices(*shape)
    expected = torch.stack([in_float64(matrix) for matrix in matrices])
    torch.testing.assert_close(orthogonalize(matrices, 5), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_has_the_bits_of_torchs_muon(shape):
    (matrix, *_) = random_matrices(*shape)
    weight = torch.zeros_like(matrix)
    weight.grad = matrix.clone()
    # Without momentum, the update of a zero weight is the orthogonalized gradient.
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, adjust_lr_fn="match_rms_adamw").step()
    scale = 0.2 * max(matrix.shape) ** 0.5
    expected = orthogonalize(matrix.bfloat16()[None], 5)[0].float()
    assert torch.equal(weight, torch.zeros_like(weight).add(expected, alpha=-scale))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_result_is_near_the_polar_factor(shape):
    matrices = random_matrices(*shape)
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    inner = u.mT @ orthogonalize(matrices, 5).double() @ vh.mT
    factors = inner.diagonal(dim1=1, dim2=2)
    # The smallest singular values of a square matrix need more than five iterations.
    is_large = s > s.amax(dim=1, keepdim=True) / 50
    assert is_large.sum() > 0.9 * s.numel()
    assert 0.6 < factors[is_large].min() < factors[is_large].max() < 1.3
    assert (inner - torch.diag_embed(factors)).abs().max() < 1e-4


def test_zeros_remain_zeros():
    assert not orthogonalize(torch.zeros(2, 3, 4), 5).any()


def test_rounds_have_matrices_of_similar_cost():
    assert deal([1, 7, 3, 5, 2], 2, lambda cost: cost) == [[7, 5], [3, 2], [1]]


def matrices_of(name: str, recipe: Recipe, layer: torch.nn.Module) -> list[tuple[Tensor, int]]:
    """Return (rows, number of heads) of each matrix that is fused in a tensor.

    The rows of ``linear_qkv`` come from the functions of the forward pass: their input is a
    projection to the numbers of its own rows.
    """
    shapes = {
        f"{prefix}.weight": getattr(getattr(layer, module), prefix).weight.shape[0]
        for module, prefix in (
            ("self_attention", "linear_qkv"), ("self_attention", "linear_proj"),
            ("mlp", "linear_fc1"), ("mlp", "linear_fc2"),
        )
    }  # fmt: skip
    suffix = ".".join(name.split(".")[-2:])
    if suffix == "linear_fc1.weight":
        return [(rows, 1) for rows in torch.arange(shapes[suffix]).chunk(2)]
    if suffix != "linear_qkv.weight":
        return [(torch.arange(shapes.get(suffix, recipe.model.attention.num_heads)), 1)]
    kind = recipe.model.attention.of_layer(0)
    numbers = torch.arange(float(shapes[suffix])).view(1, 1, -1)
    query, key, value, gate = layer.self_attention._split(numbers)
    query, key = query.flatten(2, 3), key.flatten(2, 3)
    if kind.kind in ("diff_v1", "grouped"):
        parts = list(split_maps(query, key, value, kind.ratio))
    elif kind.kind == "diff_v2":
        is_noise = torch.arange(query.shape[2]) % (kind.ratio + 1) == kind.ratio
        parts = [query[:, :, ~is_noise], query[:, :, is_noise], key, value]
    else:
        parts = [query, key, value]
    if gate is not None:
        parts.append(gate.unflatten(2, (kind.num_heads, -1)))
    return [(part.flatten().long(), part.shape[2]) for part in parts]


def reference(recipe: Recipe) -> dict[str, Tensor]:
    """Train with torch's Muon on separate matrices and torch's AdamW; return weights by name."""
    config = recipe.optimizer
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(recipe, parallel_state)
        named = {found[0].name: p for p, found in parameter_shards(network).items()}
        layer = network.virtual_stages[0].decoder.layers[0]
        leaves: dict[tuple[str, Tensor], Tensor] = {}
        for name, parameter in named.items():
            if not name.startswith("decoder.layers.") or parameter.dim() < 2:
                continue
            for rows, heads in matrices_of(name, recipe, layer):
                for part in rows.chunk(heads if config.muon.per_head else 1):
                    leaves[name, part] = parameter.detach()[part].clone()
        of_muon = {name for name, _ in leaves}
        matrices = torch.optim.Muon(
            leaves.values(), weight_decay=config.weight_decay, momentum=config.muon.momentum,
            nesterov=config.muon.nesterov,
            adjust_lr_fn={"rms": "match_rms_adamw", "spectral": "original"}[config.muon.scale],
        )  # fmt: skip
        others = {name: p for name, p in named.items() if name not in of_muon}
        adamw = torch.optim.AdamW(
            [
                {"params": [p], "weight_decay": config.weight_decay if p.dim() > 1 else 0.0}
                for p in others.values()
            ],
            betas=config.betas,
        )
        loader = open_loader(recipe, parallel_state, "train")
        for step in range(1, recipe.training.total_steps + 1):
            network.zero_grad()
            batches = on_this_rank(next(loader), parallel_state)
            count = sum(batch.loss_mask.sum() for batch in batches)
            for batch in batches:
                (summed_loss(network, batch) / count).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), config.clip_grad_norm)
            for (name, rows), leaf in leaves.items():
                leaf.grad = named[name].grad[rows].clone()
            rate = learning_rate(step, recipe.training.total_steps, config)
            for optimizer, factor in ((matrices, 0.5), (adamw, 1.0)):
                for group in optimizer.param_groups:
                    group["lr"] = rate * factor
                optimizer.step()
            for (name, rows), leaf in leaves.items():
                named[name].data[rows] = leaf
        return {name: parameter.detach().clone() for name, parameter in named.items()}


@pytest.mark.parametrize(
    "settings", ["per_head: false", "per_head: true, nesterov: false, scale: spectral"]
)
@pytest.mark.parametrize(
    "attention",
    [
        "{kind: diff_v1, num_heads: 4, num_kv_heads: 2, output_gate: elementwise}",
        "{kind: grouped, num_heads: 8, num_kv_heads: 2, signal_per_noise: 2, head_dim: 8}",
        "{kind: diff_v2, num_heads: 8, num_kv_heads: 2, signal_per_noise: 2, "
        "output_gate: headwise}",
        "{kind: softmax, num_heads: 4, num_kv_heads: 2, output_gate: elementwise}",
    ],
    ids=["v1", "grouped", "v2", "softmax"],
)
def test_fused_weights_train_as_separate_matrices_of_torchs_muon(
    attention, settings, tiny_recipe, monkeypatch
):
    # torch orthogonalizes in bf16, whose rounding would hide small errors.
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", in_float64)
    recipe = tiny_recipe(
        f"model.attention={attention}", "training.steps=4", "optimizer.kind=muon",
        f"optimizer.muon={{lr: 0.0015, {settings}}}", "optimizer.clip_grad_norm=0.5",
    )  # fmt: skip
    train(recipe)
    tensors = open_checkpoint(CheckpointStore(Path(recipe.run_dir)).latest()).tensors
    expected = reference(recipe)
    assert sorted(expected) == sorted(tensors.names())
    for name, value in expected.items():
        is_matrix = name.startswith("decoder.layers.") and value.dim() == 2
        assert tensors.kinds(name) == (
            ("weight", "exp_avg") if is_matrix else ("weight", "exp_avg", "exp_avg_sq")
        )
        torch.testing.assert_close(tensors.read_tensor(WEIGHT, name), value, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["optimizer.muon={steps: 6}"], "optimizer.kind is 'adamw', which does not read"),
        (["optimizer.kind=muon", "model.lora={rank: 2, alpha: 2}"], "lora trains two factors"),
        (["optimizer.kind=muon", "optimizer.trainable=['*.lambda_*']"], "selects no matrix"),
    ],
)  # fmt: skip
def test_settings_without_effect_are_refused(overrides, sentence, tiny_recipe):
    with pytest.raises(UserError, match=sentence):
        tiny_recipe(*overrides)
