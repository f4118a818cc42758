"""Tests of the cross-entropy kernel in Triton's interpreter against torch's in float64."""

import pytest
import torch
from torch import distributed

from diffmegatron.config.load import load_recipe
from diffmegatron.model import cross_entropy_kernel as module
from diffmegatron.model import language_model_loss
from diffmegatron.model.build import build_model
from diffmegatron.model.cross_entropy_kernel import cross_entropy
from diffmegatron.parallel.parallel_state import process_groups
from tests.paths import ROOT

ROWS, WORDS, Z_LOSS = 5, 44, 0.01


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 16)


def made(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = 8 * torch.randn(ROWS, WORDS, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 15, 16, 43, 21])
    weights = torch.randn(ROWS, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, weights


def expected(logits, labels, weights):
    """Return torch's sums of cross-entropy and z-loss, and their gradient, in float64."""
    exact = logits.detach().double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    losses = losses + Z_LOSS * exact.logsumexp(1).square()
    (losses * weights).sum().backward()
    return losses.detach(), exact.grad


def computed(logits, labels, weights, group=None, unpadded_size=None):
    # The kernel's backward pass overwrites its input with the gradient. The input is therefore
    # `given * 1`, a new tensor. Like the logits of a network, it is not a leaf tensor.
    given = logits.detach().clone().requires_grad_()
    losses, log_total = cross_entropy(given * 1, labels, group, unpadded_size)
    losses = losses + Z_LOSS * log_total.square()
    (losses * weights).sum().backward()
    return losses.detach(), given.grad


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)]
)
def test_losses_and_gradients_are_torchs(dtype, tolerance):
    logits, labels, weights = made(dtype)
    losses, gradient = computed(logits, labels, weights)
    exact_losses, exact_gradient = expected(logits, labels, weights)
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert gradient.dtype == dtype
    # Only the gradient is rounded to the dtype of the logits. Losses of bf16 logits are float32.
    torch.testing.assert_close(
        losses.double(), exact_losses, rtol=min(tolerance, 2e-6), atol=min(tolerance, 2e-6)
    )
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("by_count", [False, True])
def test_padded_vocabulary_entries_are_ignored(by_count):
    logits, labels, weights = made()
    labels = labels.clamp(max=30)
    unpadded_size = None
    if by_count:
        unpadded_size = 32
    else:
        logits[:, 32:] = -torch.inf
    losses, gradient = computed(logits, labels, weights, unpadded_size=unpadded_size)
    exact_losses, exact_gradient = expected(logits[:, :32], labels, weights)
    torch.testing.assert_close(losses, exact_losses, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradient[:, :32], exact_gradient, rtol=1e-13, atol=1e-13)
    assert not gradient[:, 32:].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nonfinite_logit_makes_its_loss_nonfinite(bad):
    logits, labels, weights = made()
    logits[2, 7] = bad
    losses, _ = computed(logits, labels, weights)
    assert losses.isfinite().tolist() == [True, True, False, True, True]


def reduction_with(statistics):
    """Return a stand-in for all_reduce over two ranks; the other rank has these statistics."""
    largest, total, of_label = statistics
    found = []

    def all_reduce(tensor, op=distributed.ReduceOp.SUM, group=None):
        if op == distributed.ReduceOp.MAX:
            found.append(tensor.copy_(torch.maximum(tensor, largest)))
        else:
            tensor += torch.stack([total * (largest - found.pop()).exp(), of_label])

    return all_reduce


@pytest.mark.parametrize("padded", [False, True])
def test_ranks_share_the_vocabulary(monkeypatch, padded):
    """Check two ranks, each with half of the vocabulary, against torch with the whole one."""
    logits, labels, weights = made()
    if padded:
        # The second rank's shard is only padding.
        logits[:, 22:], labels = -torch.inf, labels.clamp(max=21)
    shares = [share.contiguous() for share in logits.chunk(2, dim=1)]
    monkeypatch.setattr(distributed, "get_world_size", lambda _: 2)
    exact_losses, exact_gradient = expected(logits, labels, weights)
    statistics = [
        module._statistics(share, labels - rank * share.shape[1], share.shape[1])
        for rank, share in enumerate(shares)
    ]
    for rank, share in enumerate(shares):
        monkeypatch.setattr(distributed, "get_rank", lambda _, rank=rank: rank)
        monkeypatch.setattr(distributed, "all_reduce", reduction_with(statistics[1 - rank]))
        losses, gradient = computed(share, labels, weights, group="both")
        torch.testing.assert_close(losses, exact_losses, rtol=1e-13, atol=1e-13)
        part = exact_gradient.chunk(2, dim=1)[rank]
        torch.testing.assert_close(gradient, part, rtol=1e-13, atol=1e-13)


def test_a_second_backward_through_overwritten_logits_is_an_error():
    logits, labels, _ = made()
    given = logits.requires_grad_() * 1
    losses, _ = cross_entropy(given, labels)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()


def test_a_network_with_the_kernel_equals_one_with_megatrons_loss(monkeypatch):
    """Check that a network has equal losses and gradients with the kernel and without it.

    The network has recomputed loss chunks, a z-loss, a padded vocabulary and a tied embedding.
    """
    sizes = {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32, "vocab_size": 64}
    recipe = load_recipe(
        ROOT / "configs/diff_3b_1t.yaml",
        [
            *(f"model.{name}={size}" for name, size in sizes.items()),
            *("model.attention.num_heads=1", "model.vocab_padding=3", "model.tied_embeddings=true"),
            *("data.tokenizer=bytes", "training.seq_length=8", "training.precision=fp32"),
            *("training.loss_chunk=3", f"training.z_loss={Z_LOSS}"),
        ],
    )
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))

    def losses_and_gradients(network):
        network.zero_grad()
        losses = network(tokens[:, :-1], labels=tokens[:, 1:])
        (losses * torch.arange(16.0).view(2, 8)).sum().backward()
        return [losses.detach(), *(p.grad.clone() for p in network.parameters())]

    with process_groups(recipe.parallel, 0) as parallel_state:
        network = build_model(recipe, parallel_state)
        expected = losses_and_gradients(network)
        monkeypatch.setattr(language_model_loss, "_has_kernel", lambda _: True)
        found = losses_and_gradients(network)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)
