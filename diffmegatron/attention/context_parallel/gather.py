"""All-gather of keys and values: two plain causal calls per rank, one for each of its chunks.

The least communication steps and the fastest kernels, for the price of holding the whole
sequence's keys and values for the backward pass: for short sequences on many ranks.
"""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from diffmegatron.attention.context_parallel.zigzag import rank_chunks, to_sequence_order

# (query chunk, all keys up to its end, their values, number of the chunk) -> its heads
AttendChunk = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, attend: AttendChunk
) -> Tensor:
    """Causal attention of a rank's queries over the whole sequence.

    Args:
        query: [s, b, heads, d], this rank's zigzag part; key and value likewise.
        group: the context-parallel ranks.
        attend: from a query chunk [s / 2, b, heads, d] that ends where keys and values
            [t, b, heads, d] end, and the chunk's number, to [s / 2, b, heads, e].

    Returns:
        [s, b, heads, e].
    """
    size, rank = group.size(), group.rank()
    key, value = (whole_sequence(x, group) for x in (key, value))
    length = query.shape[0] // 2
    outs = []
    for chunk, number in zip(query.chunk(2), rank_chunks(rank, size), strict=True):
        end = (number + 1) * length
        outs.append(attend(chunk, key[:end], value[:end], number))
    return torch.cat(outs)


def whole_sequence(local: Tensor, group: ProcessGroup) -> Tensor:
    """The sequence along the first dimension; the backward sums each rank's part.

    Args:
        local: this rank's zigzag part.
        group: the context-parallel ranks.
    """
    by_rank = gather_from_sequence_parallel_region(
        local.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return to_sequence_order(by_rank, group.size())
