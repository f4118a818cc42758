"""Zigzag order: the shards of a sequence on context-parallel ranks.

For P ranks the sequence is cut into 2 * P chunks. Rank r has the chunks r and 2 * P - 1 - r,
counted from 0. With a causal mask every rank then computes the same number of (query, key) pairs.
Megatron-core shards its rotary embeddings in the same way (models/common/embeddings/rope_utils.py).
"""

import torch
from torch import Tensor

from diffmegatron.attention.context_parallel.chunk_numbers import rank_chunks


def shard_sequence(whole: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Return a rank's zigzag shard of a tensor; 2 * ``size`` must divide the length of ``dim``."""
    chunks = whole.chunk(2 * size, dim)
    return torch.cat([chunks[number] for number in rank_chunks(rank, size)], dim)


def to_sequence_order(by_rank: Tensor, size: int) -> Tensor:
    """Reorder all ranks' shards, concatenated along dimension 0, into the order of the sequence."""
    return _reordered(by_rank, _chunks_by_rank(size).argsort())


def to_rank_order(whole: Tensor, size: int) -> Tensor:
    """Reorder a sequence along dimension 0 into the concatenated shards of all ranks."""
    return _reordered(whole, _chunks_by_rank(size))


def _chunks_by_rank(size: int) -> Tensor:
    return torch.tensor([rank_chunks(rank, size) for rank in range(size)]).flatten()


def _reordered(tensor: Tensor, order: Tensor) -> Tensor:
    chunks = tensor.unflatten(0, (len(order), -1))
    return chunks.index_select(0, order.to(tensor.device)).flatten(0, 1)
