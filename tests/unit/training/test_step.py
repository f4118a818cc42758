"""Loss and gradients of a step do not depend on how the global batch is cut into microbatches."""

from dataclasses import dataclass, replace

import pytest
import torch

from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.step import forward_backward, forward_only

LENGTH = 16


@dataclass
class PlainEngine:
    """Engine that replaces DeepSpeed and uses only autograd."""

    network: torch.nn.Module

    def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self.network(*args, **kwargs)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        loss.backward()


def batch(masks: list[list[float]], ends: list[int] | None = None) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 257, (4, LENGTH + 1), generator=generator)
    mask = torch.tensor(masks).repeat_interleave(LENGTH // len(masks[0]), dim=1)
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=mask,
        cu_seqlens=None if ends is None else torch.tensor([0, *ends], dtype=torch.int32),
    )


def rows(whole: Batch, *numbers: int) -> Batch:
    picked = list(numbers)
    return Batch(whole.tokens[picked], whole.labels[picked], whole.loss_mask[picked])


def run(recipe, microbatches: list[Batch]):
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(recipe, parallel_state)
        loss = forward_backward(PlainEngine(network), microbatches, parallel_state)
        held_out = forward_only(network, microbatches, parallel_state)
        token_losses = network(microbatches[0].tokens, labels=microbatches[0].labels)
    gradients = {name: p.grad for name, p in network.named_parameters()}
    return loss.mean.item(), held_out.mean.item(), gradients, token_losses.detach()


UNEVEN = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]


def test_tokens_weigh_the_same_whichever_microbatch_they_are_in(tiny_recipe):
    whole = batch(UNEVEN)
    loss, held_out, expected, token_losses = run(tiny_recipe(), [whole])
    assert loss == held_out
    mask = whole.loss_mask.bool()
    assert abs(loss - token_losses[mask].double().mean().item()) < 1e-5
    parted = [rows(whole, 0), rows(whole, 1, 2), rows(whole, 3)]
    cut_loss, _, gradients, _ = run(tiny_recipe(), parted)
    assert abs(cut_loss - loss) < 1e-6
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


def test_the_z_loss_counts_the_same_tokens_as_the_cross_entropy(tiny_recipe):
    recipe, whole = tiny_recipe("training.z_loss=0.01"), batch(UNEVEN)
    parted, observed = [rows(whole, 0), rows(whole, 1, 2), rows(whole, 3)], []
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(recipe, parallel_state)
        logits = network(whole.tokens).double()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), whole.labels.flatten(), reduction="none"
        )
        mask = whole.loss_mask.flatten().bool()
        z_loss = 0.01 * logits.logsumexp(-1).square().flatten()[mask].mean()
        (losses[mask].mean() + z_loss).backward()
        expected = {name: p.grad.clone() for name, p in network.named_parameters()}
        network.zero_grad()
        loss = forward_backward(
            PlainEngine(network),
            parted,
            parallel_state,
            observe=lambda _, each: observed.append(each),
        )
        network.eval()
        held_out = forward_only(network, parted, parallel_state)
    assert loss.mean.item() == pytest.approx(losses[mask].mean().item(), rel=1e-6)
    assert loss.z_mean.item() == pytest.approx(z_loss.item(), rel=1e-6)
    assert (held_out.mean, held_out.z_mean) == (loss.mean, 0)
    torch.testing.assert_close(
        torch.cat(observed).flatten().double(), losses.detach(), rtol=1e-5, atol=1e-5
    )
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_a_batch_with_nothing_to_learn_has_no_gradient(tiny_recipe):
    loss, _, gradients, _ = run(tiny_recipe(), [batch([[0.0]] * 4)])
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_boundaries_separate_documents_in_attention(tiny_recipe):
    """Check that the loss of a row's second document does not depend on the first document.

    Without boundaries, the loss depends on the first document.
    """
    ends = [row * LENGTH + end for row in range(4) for end in (6, LENGTH)]
    second = [[0.0] * 6 + [1.0] * (LENGTH - 6)] * 4
    one = batch(second, ends)
    tokens = torch.cat([one.tokens[:, :6].flip(0), one.tokens[:, 6:]], dim=1)
    other = replace(one, tokens=tokens)
    assert run(tiny_recipe(), [one])[0] == run(tiny_recipe(), [other])[0]
    crossing = [replace(each, cu_seqlens=None) for each in (one, other)]
    assert run(tiny_recipe(), crossing[:1])[0] != run(tiny_recipe(), crossing[1:])[0]
