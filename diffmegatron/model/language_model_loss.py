"""Cross-entropy loss of a network on the next token, in chunks of the sequence."""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

# Computes losses [b, s] from labels [b, s] and hidden states or logits.
Losses = Callable[[Tensor, Tensor], Tensor]


def chunked_losses(losses: Losses, labels: Tensor, hidden: Tensor, size: int) -> Tensor:
    """Compute losses of ``size`` positions at a time, with logits recomputed in the backward pass.

    All logits of 65,536 positions over 100,288 words would be 26 GB in float32. Megatron-core's
    fused linear cross-entropy (``cross_entropy_fusion_impl="linear"``) runs on Blackwell only, and
    Liger's does not support a vocabulary-parallel output layer.

    Under sequence parallelism the output layer gathers a chunk from all ranks, so the positions and
    labels of a chunk are a range of each rank's part.

    Args:
        losses: computes the losses of a chunk from its labels and hidden states.
        labels: [b, s].
        hidden: [s, b, h], or [s / tensor, b, h] under sequence parallelism.
        size: number of positions in a chunk.

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

    Rows that pad the vocabulary are excluded. A pretrained model was trained without them, and with
    logits of zero they would be among its more likely words.

    Args:
        megatrons: Megatron-core's cross-entropy, used if Triton's kernel cannot run.
        labels: [b, s].
        logits: [s, b, v]; padded words are overwritten.
        group: tensor-parallel ranks.
        used: number of this rank's rows that are words.
    """
    if _has_kernel(logits):
        from diffmegatron.model import cross_entropy_kernel

        losses = cross_entropy_kernel.cross_entropy(
            logits.flatten(0, 1), labels.T.flatten(), group, used
        )
        return losses.view(logits.shape[:2]).T.contiguous()
    if used < logits.shape[-1]:
        # In place, because the logits are the largest tensor and no earlier operation needs them.
        logits[..., used:] = -torch.inf
    return megatrons(labels, logits)


def _has_kernel(logits: Tensor) -> bool:
    """Return whether Triton's cross-entropy can run on the logits' device."""
    return logits.is_cuda and importlib.util.find_spec("triton") is not None
