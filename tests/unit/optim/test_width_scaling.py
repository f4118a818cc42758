"""Tests of muP: a network whose channels are copied trains as the network that it copies."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffmegatron.attention.kinds.two_maps import LAMBDA_VECTORS
from diffmegatron.config.recipe_changes import changes_in_words
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import check_can_start_from
from diffmegatron.config.width_scaling import scaling_in_words
from diffmegatron.errors import UserError
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.adamw import create_optimizer
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import summed_loss
from diffmegatron.training.trainer import logged_rates

STEPS = 4
# All angles are almost 0, so that the copies of a channel, which another frequency would rotate,
# stay equal.
NO_ROTATION = "model.rope_scaling={kind: linear, factor: 1.0e9}"


def train(
    recipe: Recipe, begin: Callable[[str, Tensor], Tensor]
) -> tuple[list[float], dict[str, Tensor], float]:
    """Train with AdamW alone.

    Return the losses, the weights before the first step by name, and the norm of the last gradient
    of the final norm. ``begin`` returns these weights from a name and the initial value.
    """
    losses = []
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(recipe, parallel_state)
        shards = parameter_shards(network)
        named = {found[0].name: p for p, found in shards.items()}
        weights = {name: begin(name, p.detach().clone()) for name, p in named.items()}
        for name, value in weights.items():
            assert value.shape == named[name].shape, name
            named[name].data.copy_(value)
        optimizer = create_optimizer(shards, recipe)
        optimizer.gate, optimizer.decaying_rows, optimizer.muon = lambda: True, {}, {}
        loader = open_loader(recipe, parallel_state, "train")
        for _ in range(STEPS):
            optimizer.zero_grad()
            batches = on_this_rank(next(loader), parallel_state)
            loss = sum(summed_loss(network, batch) for batch in batches)
            loss = loss / sum(batch.loss_mask.sum() for batch in batches)
            loss.backward()
            losses.append(loss.item())
            for group in optimizer.param_groups:
                group["lr"] = recipe.optimizer.lr * group["lr_factor"]
            optimizer.step()
        gradient = named["decoder.final_layernorm.weight"].grad
    assert gradient is not None
    return losses, weights, gradient.norm().item()


def copied(name: str, base: Tensor, width: int, *, heads: int, channels: int) -> Tensor:
    """Return a base network's tensor for a network of ``heads x channels`` times the width.

    The network has ``heads`` times as many heads, each with ``channels`` times as many channels.
    ``width`` is ``head_dim`` of the base network.
    """
    _, is_attention, own = name.rpartition(".self_attention.")

    def axis(tensor: Tensor, *, is_hidden: bool) -> Tensor:
        """Copy the first axis: hidden channels, or channels of heads."""
        if is_hidden or not is_attention or own in ("lambda_proj", "output_gate"):
            times = heads * channels if is_hidden or not is_attention else heads
            return torch.cat([tensor] * times)
        within = tensor.unflatten(0, (-1, width)).repeat(1, channels, *[1] * (tensor.dim() - 1))
        is_shared = own in ("q_norm", "k_norm", "head_norm", *LAMBDA_VECTORS)
        return torch.cat([within.flatten(0, 1)] * (1 if is_shared else heads))

    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return axis(base.T, is_hidden=True).T
    if base.dim() == 1:
        wide = axis(base, is_hidden=not is_attention)
        if name == "decoder.final_layernorm.weight":
            return wide / (heads * channels)
        return wide * (channels**-0.5 if own in ("q_norm", *LAMBDA_VECTORS) else 1.0)
    if name.endswith("linear_fc1.weight"):
        rows = torch.cat([axis(half, is_hidden=True) for half in base.chunk(2)])
    else:
        writes_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        rows = axis(base, is_hidden=writes_residual)
    reads_heads = name.endswith("linear_proj.weight")
    return axis(rows.T, is_hidden=not reads_heads).T / (heads * channels)


@pytest.mark.parametrize(
    ("attention", "heads", "channels", "tied"),
    [
        ("kind: diff_v1, lambda_std: 0.3", 2, 1, True),
        ("kind: diff_v1, qk_norm: true, output_gate: headwise, lambda_std: 0.3", 1, 4, False),
        ("kind: grouped, signal_per_noise: 2, output_gate: elementwise", 3, 1, False),
        ("kind: diff_v2, output_gate: headwise", 2, 1, False),
        ("kind: diff_v2, qk_norm: true", 2, 2, True),
        ("kind: softmax, qkv_bias: true", 2, 1, True),
    ],
)
def test_a_network_with_copied_channels_trains_as_its_base(
    attention, heads, channels, tied, tiny_recipe
):
    width, base_heads = 8, 4
    own = tiny_recipe(
        f"model.attention={{{attention}, num_heads: {base_heads}, head_dim: {width}}}"
    )
    outputs = own.model.attention.kinds[0].heads.output_channels

    # A large eps, and a large decay, without which the factors of both would have no effect. The
    # factors of eps have no powers of ``channels``.
    eps = 1e-3 if channels == 1 else 1e-12

    def network(heads: int, channels: int) -> Recipe:
        return tiny_recipe(
            f"model.attention={{{attention}, num_heads: {base_heads * heads}, "
            f"num_kv_heads: {2 * heads}, head_dim: {width * channels}}}",
            f"model.hidden_size={outputs * heads * channels}",
            f"model.ffn_hidden_size={48 * heads * channels}",
            f"model.tied_embeddings={tied}",
            f"model.initialization={{scheme: mup, base_hidden_size: {outputs}, "
            f"base_head_dim: {width}, embedding_std: 0.5}}",
            NO_ROTATION, "optimizer.lr=0.01", f"optimizer.eps={eps}", "optimizer.weight_decay=3",
        )  # fmt: skip

    generator = torch.Generator().manual_seed(1)

    def varied(_: str, value: Tensor) -> Tensor:
        """Make the weights of norms different, to show where the network applies them."""
        if value.dim() > 1:
            return value
        return value + 0.2 * torch.rand(value.shape, generator=generator)

    expected, base, base_norm = train(network(1, 1), varied)
    losses, _, norm = train(
        network(heads, channels),
        lambda name, _: copied(name, base[name], width, heads=heads, channels=channels),
    )
    assert max(expected) - min(expected) > 0.1
    assert losses == pytest.approx(expected, rel=2e-5)
    # The gradient has copies of each number, divided by their count.
    assert norm == pytest.approx(base_norm / (heads * channels) ** 0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["model.initialization.scheme=mup"], "needs base_hidden_size"),
        (["model.initialization.base_hidden_size=8"], "'scaled', which does not read it"),
        (["model.initialization={MUP, base_head_dim: 4}"], "set model.attention.qk_norm"),
        (["model.initialization={MUP}", "model.lora={rank: 2, alpha: 2}"], "adapts a pretrained"),
        (
            ["model.initialization={MUP}", "optimizer={kind: muon, lr: 1, muon: {per_head: true}}"],
            "one matrix per head",
        ),
        (
            ["model.initialization={MUP}", "model.attention={kind: dex, num_heads: 4, "
             "selected_heads: [[0], [1]], annealing_steps: null}"],
            "extends a pretrained one",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(overrides, sentence, tiny_recipe):
    given = (each.replace("MUP", "scheme: mup, base_hidden_size: 8") for each in overrides)
    with pytest.raises(UserError, match=sentence):
        tiny_recipe(*given)


@pytest.mark.parametrize(("scale", "factor"), [("rms", 0.5), ("spectral", 1.0)])
def test_the_change_by_muon_does_not_depend_on_the_width(scale, factor, tiny_recipe):
    recipe = tiny_recipe(
        "model.initialization={scheme: mup, base_hidden_size: 16}",
        f"optimizer={{kind: muon, lr: 1.0e-3, weight_decay: 0.1, muon: {{scale: {scale}}}}}",
    )
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        shards = parameter_shards(build_model(recipe, parallel_state))
        groups = create_optimizer(shards, recipe).param_groups
    (matrices,) = (group for group in groups if group["is_muon"])
    assert scaling_in_words(recipe) == f"std x 0.5, lr x {factor:g} (4 base widths)"
    # The spectral norm of an update is 0.2 sqrt(columns) times the rate with rms.
    assert matrices["lr_factor"] == factor
    assert matrices["lr_factor"] * matrices["weight_decay"] == pytest.approx(0.1)
    assert logged_rates(2.0, recipe) == {"train/lr": 2.0, "train/lr_muon": 2.0 * factor}


def test_the_log_has_the_rate_of_the_matrices(tiny_recipe):
    recipe = tiny_recipe(
        "model.initialization={scheme: mup, base_hidden_size: 16}",
        "optimizer.lr_multipliers={'*.mlp.*': 3}",
    )
    assert logged_rates(2.0, recipe) == {
        "train/lr": 2.0,
        "train/lr_matrices": 0.5,
        "train/lr/*.mlp.*": 6.0,
        "train/lr_matrices/*.mlp.*": 1.5,
    }


def test_a_run_starts_only_from_weights_of_its_base_width(tiny_recipe):
    ordinary, narrow, wide = (
        tiny_recipe(*settings)
        for settings in (
            (),
            ("model.initialization={scheme: mup, base_hidden_size: 16}",),
            ("model.initialization={scheme: mup, base_hidden_size: 32}",),
        )
    )
    for before in (ordinary, wide):
        with pytest.raises(UserError, match=r"before has model\.initialization"):
            check_can_start_from(before, "before", narrow, "now")
    check_can_start_from(narrow, "before", narrow, "now")
    check_can_start_from(narrow, "before", ordinary, "now")
    assert changes_in_words(narrow, narrow) is changes_in_words(ordinary, ordinary) is None
    # The network has four base widths.
    assert (
        "model.initialization.scheme mup -> scaled, so the learning rate of the layers' matrices "
        "is optimizer.lr and no longer optimizer.lr x 0.25: lower optimizer.lr, or keep 'mup'"
    ) in changes_in_words(narrow, ordinary)
    by_muon = tiny_recipe("optimizer.kind=muon")
    assert "optimizer.lr x 0.5:" in changes_in_words(narrow, by_muon)
