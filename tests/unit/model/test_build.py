"""Kernel features that a recipe's attention needs, and the MLP of a built network."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from diffmegatron.attention.kernels import registry
from diffmegatron.attention.kernels.pytorch import reference
from diffmegatron.config.attention_backend import attention_call
from diffmegatron.errors import UserError
from diffmegatron.model import build
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import process_groups


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        ([], set()),
        (["data.reset_attention_mask=true"], {"documents"}),
        (["parallel.context=2", "parallel.context_communication=ring"], {"chunks"}),
        (
            [
                "parallel.context=2",
                "parallel.context_communication=ring",
                "data.reset_attention_mask=true",
            ],
            {"documents", "offsets", "chunks", "masked chunks"},
        ),
        (["parallel.context=2", "parallel.context_communication=all_gather"], set()),
        (
            [
                "parallel.context=2",
                "parallel.context_communication=all_gather",
                "data.reset_attention_mask=true",
            ],
            {"documents", "offsets"},
        ),
        (["parallel.context=2", "parallel.context_communication=ulysses"], set()),
    ],
)
def test_a_layout_determines_what_its_kernel_needs(tiny_recipe, overrides, needs):
    recipe = tiny_recipe(*overrides)
    assert attention_call(recipe, recipe.model.attention.kinds[0], "cuda").needs == needs


def test_a_kernel_that_a_ring_cannot_use_is_refused_before_the_first_step(tiny_recipe):
    recipe = tiny_recipe(
        "parallel.context=2",
        "parallel.context_communication=ring",
        "data.reset_attention_mask=true",
        "training.attention_backend=sdpa_4call",
    )
    with (
        process_groups(tiny_recipe().parallel, seed=1) as parallel_state,
        pytest.raises(UserError, match="'sdpa_4call' cannot run: it cannot attend chunk by chunk"),
    ):
        build_model(recipe, parallel_state)


@pytest.fixture
def mlp(tiny_recipe, monkeypatch) -> Iterator[MLP]:
    """Yield an MLP of Megatron-core's local layers in float32.

    Transformer Engine is not used, because its MLP would contain the norm.
    """
    monkeypatch.setattr(build, "available_host", lambda _: "local")
    recipe = tiny_recipe("training.precision=fp32")
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        (stage,) = build_model(recipe, parallel_state).virtual_stages
        yield stage.decoder.layers[0].mlp


def value_and_gradients(mlp: MLP, tokens: Tensor) -> tuple[list[Tensor], int]:
    """Compute the MLP's result and gradients, and count the bytes that autograd saves.

    Returns:
        A list of the result and the gradients of ``tokens`` and of the two weights; and the number
        of saved bytes without ``tokens`` and the weights.
    """
    weights = [mlp.linear_fc1.weight, mlp.linear_fc2.weight]
    given = {x.untyped_storage().data_ptr() for x in (tokens, *weights)}
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out, _ = mlp(tokens)
    direction = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad(out, [tokens, *weights], direction)], sum(kept.values())


def exact_value_and_gradients(mlp: MLP, tokens: Tensor) -> list[Tensor]:
    """Return the result and its gradients, computed in float64 from the equation of SwiGLU."""
    inputs = [tokens, mlp.linear_fc1.weight, mlp.linear_fc2.weight]
    x, w1, w2 = (each.detach().double().requires_grad_() for each in inputs)
    gate, up = (x @ w1.T).chunk(2, dim=-1)
    out = (gate * gate.sigmoid() * up) @ w2.T
    direction = torch.linspace(-1, 1, out.numel()).view_as(out)
    return [out, *torch.autograd.grad(out, [x, w1, w2], direction.double())]


@pytest.mark.parametrize(("fused", "factors"), [(True, 3), (False, 5)])
def test_swiglu_is_exact_and_saves_the_bytes_that_plan_counts(fused, factors, mlp, monkeypatch):
    """Check that SwiGLU equals its equation and saves the planned bytes, with and without fusion.

    SwiGLU is fused on GPUs. The fused functions run uncompiled here, because their compilation
    takes 19 s.
    """
    monkeypatch.setattr(mlp.config, "bias_activation_fusion", fused)
    tokens = torch.randn(6, 2, mlp.config.hidden_size, requires_grad=True)
    with torch.compiler.set_stance("force_eager"):
        found, kept = value_and_gradients(mlp, tokens)
    for actual, exact in zip(found, exact_value_and_gradients(mlp, tokens), strict=True):
        assert (actual - exact).norm() < 1e-6 * exact.norm()
    assert kept == 6 * 2 * factors * mlp.config.ffn_hidden_size * 4


@pytest.mark.parametrize("kind", ["diff_v1", "softmax"])
def test_a_backend_is_chosen_once_when_the_network_is_built(tiny_recipe, monkeypatch, kind):
    """Check that a forward pass uses the backend that the device had when its layers were built."""
    recipe = tiny_recipe(f"model.attention={{kind: {kind}, head_dim: 8}}")
    operation = recipe.model.attention.kinds[0].operation
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        monkeypatch.setitem(registry.AUTO_ORDER[operation], "cpu", ("reference",))
        network = build_model(recipe, parallel_state)
        monkeypatch.setitem(registry.AUTO_ORDER[operation], "cpu", ())
        used = []
        attend = reference.attend
        monkeypatch.setattr(reference, "attend", lambda call: used.append(call) or attend(call))
        network(tokens)
    assert len(used) == recipe.model.num_layers
