"""Recomputation, chunked losses and offloaded activations: saved memory and equal results."""

from contextlib import nullcontext

import pytest
import torch

from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.step import offloaded_activations, summed_loss

LENGTH = 64
KINDS = {
    "diff_v1": ["model.attention.output_gate=elementwise"],
    "diff_v2": ["model.attention.kind=diff_v2", "model.attention.output_gate=headwise"],
    "grouped": ["model.attention.kind=grouped", "model.attention.signal_per_noise=2"],
    "dex": ["model.attention={kind: dex, selected_heads: [[0], [1, 3]], annealing_steps: null}"],
}


def a_batch() -> Batch:
    tokens = torch.randint(0, 257, (2, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=torch.ones(2, LENGTH),
    )


def run(recipe, *, offload: bool = False) -> tuple[float, dict[str, torch.Tensor], int]:
    """Return the loss, the gradients, and the bytes that autograd saved without the weights."""
    kept: dict[int, int] = {}

    def count(saved: torch.Tensor) -> torch.Tensor:
        storage = saved.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return saved

    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(recipe, parallel_state)
        with (
            torch.autograd.graph.saved_tensors_hooks(count, lambda saved: saved),
            offloaded_activations(network) if offload else nullcontext(),
        ):
            loss = summed_loss(network, a_batch())
        for parameter in network.parameters():
            kept.pop(parameter.untyped_storage().data_ptr(), None)
        loss.backward()
        gradients = {name: p.grad for name, p in network.named_parameters()}
    return loss.item(), gradients, sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "overrides",
    [
        ["recompute.granularity=selective"],
        ["recompute.granularity=full"],
        ["recompute.granularity=full", "recompute.layers=2"],
        ["recompute.granularity=full", "recompute.method=block", "recompute.layers=1"],
    ],
    ids=["selective", "uniform", "uniform in twos", "block"],
)
def test_recomputation_gives_the_same_bits(tiny_recipe, overrides, kind):
    expected_loss, expected, kept = run(tiny_recipe(*KINDS[kind]))
    loss, gradients, less = run(tiny_recipe(*KINDS[kind], *overrides))
    assert loss == expected_loss
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    if "full" in overrides[0]:
        assert less < 0.7 * kept


@pytest.mark.parametrize("chunk", [1, 24, 64, 1000])
@pytest.mark.parametrize("tied", [False, True])
def test_a_chunked_loss_equals_the_whole_loss_in_less_memory(tiny_recipe, chunk, tied):
    model = f"model.tied_embeddings={tied}"
    expected_loss, expected, kept = run(tiny_recipe(model))
    loss, gradients, less = run(tiny_recipe(model, f"training.loss_chunk={chunk}"))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    # At least the float32 probabilities are not saved: 2 x 64 positions x 320 tokens x 4 bytes.
    assert less <= kept - 2 * 64 * 320 * 4


def test_offloaded_activations_come_back(tiny_recipe):
    expected_loss, expected, _ = run(tiny_recipe())
    loss, gradients, _ = run(tiny_recipe(), offload=True)
    assert loss == expected_loss
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name


def test_activations_are_copied_and_weights_are_not():
    linear = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)
    rows = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    before = rows.detach().clone()
    with offloaded_activations(linear):
        out = linear(rows)
    with torch.no_grad():
        rows.zero_()
        linear.weight.data.mul_(2)
    out.sum().backward()
    torch.testing.assert_close(linear.weight.grad, before.sum(0).expand(8, -1))
    torch.testing.assert_close(rows.grad, linear.weight.detach().sum(0).expand(4, -1))
