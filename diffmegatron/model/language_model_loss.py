"""Cross-entropy loss of the next token, optionally in chunks of the sequence to save memory.

In shapes, b is the number of sequences in a microbatch, and s the number of positions on this
context-parallel rank.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

# Function that returns losses [b, s] from labels [b, s] and hidden states or logits [s, b, ...].
Losses = Callable[[Tensor, Tensor], Tensor]


def chunked_losses(losses: Losses, labels: Tensor, hidden: Tensor, size: int) -> Tensor:
    """Compute the losses [b, s] in chunks of ``size`` positions, to limit the memory of logits.

    The backward pass recomputes each chunk's logits. ``labels`` are [b, s], and ``hidden`` is
    [s, b, hidden size]. With sequence parallelism over t ranks, ``hidden`` is
    [s / t, b, hidden size], and each rank contributes ceil(``size`` / t) positions to a chunk.
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
    fallback: Losses,
    labels: Tensor,
    logits: Tensor,
    group: distributed.ProcessGroup,
    unpadded_size: int,
) -> Tensor:
    """Return the loss of each token, [b, s], from this tensor-parallel rank's logits.

    The logits [s, b, vocabulary shard] may be overwritten. The softmax excludes vocabulary padding,
    which begins at index ``unpadded_size`` of the shard. ``fallback`` is Megatron-core's
    cross-entropy, which runs where the Triton kernel cannot run.
    """
    if _has_kernel(logits):
        from diffmegatron.model import cross_entropy_kernel

        losses = cross_entropy_kernel.cross_entropy(
            logits.flatten(0, 1), labels.T.flatten(), group, unpadded_size
        )
        return losses.view(logits.shape[:2]).T.contiguous()
    if unpadded_size < logits.shape[-1]:
        # Write in place, because a copy would need too much memory. The backward pass of
        # the output layer does not need the logits.
        logits[..., unpadded_size:] = -torch.inf
    return fallback(labels, logits)


def _has_kernel(logits: Tensor) -> bool:
    return logits.is_cuda and importlib.util.find_spec("triton") is not None
