"""Comparison of cross-entropy and z-loss with torch in float64, on all ranks of a tensor group."""

import sys

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.model.language_model_loss import chunked_losses, cross_entropy
from diffmegatron.parallel.parallel_state import process_groups

ROWS, LENGTH, HIDDEN, VOCABULARY, Z_LOSS = 3, 12, 16, 40, 0.02


def compare_with_float64(group: torch.distributed.ProcessGroup, padding: int) -> None:
    """Check values and gradients of the whole and of the chunked loss; all ranks must call this.

    The vocabulary is sharded over ``group``. The last ``padding`` of its rows are padding. Some
    labels have the weight 0.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    tokens = VOCABULARY - padding
    labels = torch.randint(0, tokens, (ROWS, LENGTH), generator=generator)
    factors = torch.randn(ROWS, LENGTH, generator=generator)
    factors[torch.rand(ROWS, LENGTH, generator=generator) < 0.3] = 0.0

    exact_hidden, exact_weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = (exact_hidden @ exact_weight[:tokens].T).transpose(0, 1)
    log_total = logits.logsumexp(-1)
    losses = log_total - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    expected = torch.stack([losses, Z_LOSS * log_total.square()])
    (expected * factors).sum().backward()

    rank, size = group.rank(), group.size()
    unpadded_size = min(max(tokens - rank * VOCABULARY // size, 0), VOCABULARY // size)
    for chunk, sequence_parallel in ((None, False), (5, False), (LENGTH, False), (5, True)):
        own_hidden = (hidden.chunk(size)[rank] if sequence_parallel else hidden).clone()
        own_weight = weight.chunk(size)[rank].clone()
        own_hidden.requires_grad_()
        own_weight.requires_grad_()
        if chunk is None:
            copied = copy_to_tensor_model_parallel_region(own_hidden, group=group)
            found = cross_entropy(labels, copied @ own_weight.T, group, unpadded_size, Z_LOSS)
        else:
            found = chunked_losses(
                labels,
                own_hidden,
                own_weight,
                size=chunk,
                group=group,
                sequence_parallel=sequence_parallel,
                unpadded_size=unpadded_size,
                z_loss=Z_LOSS,
            )
        (found * factors).sum().backward()
        hidden_grad = exact_hidden.grad
        pairs = (
            (found, expected),
            (own_hidden.grad, hidden_grad.chunk(size)[rank] if sequence_parallel else hidden_grad),
            (own_weight.grad, exact_weight.grad.chunk(size)[rank]),
        )
        for own, exact in pairs:
            torch.testing.assert_close(own.double(), exact, rtol=1e-5, atol=2e-5)


def main() -> None:
    """Compare on as many tensor-parallel ranks as the only argument."""
    parallel = ParallelConfig(tensor=int(sys.argv[1]))
    with process_groups(parallel, 0) as parallel_state:
        # With a padding of 22, the second of two ranks has only padding.
        for padding in (0, 6, 22):
            compare_with_float64(parallel_state.tensor_group, padding)
