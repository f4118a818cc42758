"""The loss of a network with the cross-entropy kernel, for which torch's function stands in."""

import pytest
import torch

from diffmegatron.config.load import load_recipe
from diffmegatron.model import language_model_loss
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import process_groups
from tests.parallel import loss_worker
from tests.paths import ROOT

SIZES = (
    *("model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=32"),
    *("model.attention.num_heads=1", "model.vocab_size=64", "model.vocab_padding=3"),
    *("data.tokenizer=bytes", "training.seq_length=8", "training.precision=fp32"),
)


@pytest.mark.parametrize(
    "overrides", [(), ("training.loss_chunk=3",), ("training.loss_chunk=3", "training.z_loss=0.01")]
)
def test_the_loss_with_a_kernel_equals_megatrons_loss(monkeypatch, overrides):
    cross_entropy = pytest.importorskip(
        "diffmegatron.model.cross_entropy_kernel", reason="needs triton"
    )
    recipe = load_recipe(ROOT / "configs/diff_3b_1t.yaml", [*SIZES, *overrides])
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    weights = torch.arange(16.0).view(2, 8)
    calls = []

    def torchs(logits, labels, group, unpadded_size):
        calls.append((group.size(), unpadded_size))
        logits = logits[:, :unpadded_size]
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return losses, logits.logsumexp(1)

    def losses_and_gradients(network):
        network.zero_grad()
        losses = network(tokens[:, :-1], labels=tokens[:, 1:])
        (losses * weights).sum().backward()
        return losses.detach(), [p.grad.clone() for p in network.parameters()]

    with process_groups(recipe.parallel, 0) as parallel_state:
        network = build_model(recipe, parallel_state)
        expected, gradients = losses_and_gradients(network)
        assert not calls
        monkeypatch.setattr(language_model_loss, "_has_kernel", lambda _: True)
        monkeypatch.setattr(cross_entropy, "cross_entropy", torchs)
        losses, own_gradients = losses_and_gradients(network)
    assert set(calls) == {(1, 61)}
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    for own, other in zip(own_gradients, gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_cross_entropy_and_z_loss_are_torchs(monkeypatch):
    monkeypatch.setattr("sys.argv", ["loss_worker", "1"])
    loss_worker.main()


def test_a_cpu_has_no_kernel():
    assert not language_model_loss._has_kernel(torch.zeros(1))
