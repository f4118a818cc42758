"""Attention backends of a recipe's layers, and the MLP of a built network."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from diffmegatron.attention.kernels import registry
from diffmegatron.attention.kernels.pytorch import reference
from diffmegatron.attention.kernels.pytorch.subtraction import subtract_noise
from diffmegatron.attention.kinds.diff_v1 import DiffV1
from diffmegatron.config.attention_backend import attention_call
from diffmegatron.errors import UserError
from diffmegatron.model import build
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.plan.summary import plan_recipe


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


@pytest.mark.parametrize(
    ("backend", "refusal"), [("flash4_2call", None), ("varlen_fa3", "needs compute capability 9.x")]
)
def test_a_kernel_that_a_gpu_cannot_run_is_refused(tiny_recipe, monkeypatch, backend, refusal):
    monkeypatch.setattr(build, "chip_of", lambda device: 10)
    monkeypatch.setattr(build, "importable_libraries", lambda: frozenset(registry.LIBRARIES))
    recipe = tiny_recipe("training.precision=bf16", f"training.attention_backend={backend}")
    gpu = SimpleNamespace(device=torch.device("cuda", 0))
    expected = nullcontext() if refusal is None else pytest.raises(UserError, match=refusal)
    with expected:
        assert build._choose_backends(recipe, gpu) == [backend] * 2


V2 = "{kind: diff_v2, num_heads: 4, head_dim: 8}"
MIXED = "[{kind: diff_v1, num_heads: 4, head_dim: 8, layers: 1}, {kind: softmax, head_dim: 8}]"


@pytest.mark.parametrize(
    ("attention", "backend", "used"),
    [
        (V2, "reference", {"reference.attend": 2, "subtraction.subtract_noise": 2}),
        (V2, "blocked", {"blocked.attend": 2, "subtraction.subtract_noise": 2}),
        (V2, "triton", {"triton_attention.attend": 2, "subtraction_kernel.subtract_noise": 2}),
        (MIXED, "reference", {"reference.attend": 2}),
    ],
)
def test_every_layer_uses_the_named_backend(tiny_recipe, monkeypatch, attention, backend, used):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    recipe = tiny_recipe(f"model.attention={attention}", f"training.attention_backend={backend}")
    calls: Counter[str] = Counter()

    def recorded(own: registry.Backend) -> Callable[..., Tensor]:
        def compute(*arguments: object) -> Tensor:
            calls[f"{own.module.rpartition('.')[2]}.{own.entry}"] += 1
            # The kernels of Triton are tested elsewhere. Here they are only called.
            instead = {"triton_attention": reference.attend, "subtraction_kernel": subtract_noise}
            return instead.get(own.module.rpartition(".")[2], load(own))(*arguments)

        return compute

    load = registry.Backend.function
    monkeypatch.setattr(registry.Backend, "function", recorded)
    with process_groups(recipe.parallel, seed=1) as parallel_state, torch.no_grad():
        build_model(recipe, parallel_state)(torch.zeros(1, 8, dtype=torch.int64))
    assert calls == used


@pytest.mark.parametrize(
    ("attention", "backend", "kind"),
    [(V2, "flash_2call", "diff_v2"), (MIXED, "sdpa_4call", "softmax"), (MIXED, "sdpa", "diff_v1")],
)
def test_a_backend_of_other_attention_is_refused(tiny_recipe, attention, backend, kind):
    recipe = tiny_recipe(f"model.attention={attention}", f"training.attention_backend={backend}")
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        for refuse in (lambda: build_model(recipe, parallel_state), lambda: plan_recipe(recipe)):
            with pytest.raises(UserError, match=f"'{backend}' does not compute .* kind '{kind}'"):
                refuse()


def test_a_kind_that_calls_another_operation_is_refused(tiny_recipe, monkeypatch):
    recipe = tiny_recipe()
    monkeypatch.setattr(DiffV1, "operation", "softmax")
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        with pytest.raises(UserError, match=r"'softmax' and calls .*diff_attention; set the"):
            network(torch.zeros(1, 8, dtype=torch.int64))


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
