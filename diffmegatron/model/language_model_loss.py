"""The loss of a network on the next token: cross-entropy, in chunks of the sequence."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

# Losses [b, s] from labels [b, s] and what they are predicted from.
Losses = Callable[[Tensor, Tensor], Tensor]


def chunked_losses(losses: Losses, labels: Tensor, hidden: Tensor, size: int) -> Tensor:
    """Compute ``size`` positions at a time; the backward pass computes their logits again.

    All logits of 65,536 positions over 100,288 words would be 26 GB in float32. Megatron-core's own
    fused linear cross-entropy (``cross_entropy_fusion_impl="linear"``) runs on Blackwell alone, and
    Liger's knows no vocabulary-parallel output layer.

    The output layer gathers what sequence-parallel ranks hold of a chunk rank by rank, so a chunk's
    positions, and their labels, are some of each rank's.

    Args:
        losses: of the labels and hidden states of a chunk.
        labels: [b, s].
        hidden: [s, b, h], or [s / tensor, b, h] when sharded.
        size: positions of a chunk.

    Returns:
        Loss of each token, [b, s].
    """
    by_rank = labels.unflatten(1, (-1, hidden.shape[0]))
    step = -(-size // by_rank.shape[1])
    chunks = [
        checkpoint(
            losses,
            by_rank[:, :, start : start + step].flatten(1),
            hidden[start : start + step],
            use_reentrant=False,
            preserve_rng_state=False,
        ).unflatten(1, (by_rank.shape[1], -1))
        for start in range(0, hidden.shape[0], step)
    ]
    return torch.cat(chunks, dim=2).flatten(1)


def cross_entropy(
    megatrons: Losses, labels: Tensor, logits: Tensor, group: distributed.ProcessGroup, used: int
) -> Tensor:
    """Return the loss of each token, [b, s], from this rank's share of the logits [s, b, v].

    Rows that pad the vocabulary take no part: a pretrained model has never had them, and at logits
    of zero they would be among its likelier words.

    Args:
        megatrons: Megatron-core's cross-entropy, taken where Triton's kernel cannot run.
        labels: [b, s].
        logits: overwritten where they are of no word.
        group: tensor-parallel ranks.
        used: how many of this rank's rows stand for words.
    """
    if _has_kernel(logits):
        from diffmegatron.model import cross_entropy_kernel

        losses = cross_entropy_kernel.cross_entropy(
            logits.flatten(0, 1), labels.T.flatten(), group, used
        )
        return losses.view(logits.shape[:2]).T.contiguous()
    if used < logits.shape[-1]:
        # In place, as nothing before it needs the logits: they are the largest tensor.
        logits[..., used:] = -torch.inf
    return megatrons(labels, logits)


def _has_kernel(logits: Tensor) -> bool:
    """Whether Triton's cross-entropy can run where the logits are; else it is Megatron-core's."""
    return logits.is_cuda and importlib.util.find_spec("triton") is not None
