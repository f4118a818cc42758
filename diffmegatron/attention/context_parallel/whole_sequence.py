"""Attention to the whole sequence: the functions that ``forward`` of a kind calls.

The arguments ``*heads`` are q, k, v or q1, k1, q2, k2, v, each `[b, s, heads, width]`. The result
is `[b, s, heads of q or q1, width of v]`. b is the batch size, and s the number of positions. With
context parallelism, s counts the positions of this rank's zigzag shard.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from diffmegatron.attention.context_parallel.chunk_numbers import rank_chunks
from diffmegatron.attention.context_parallel.ring import ring_attention
from diffmegatron.attention.context_parallel.zigzag import to_rank_order, to_sequence_order
from diffmegatron.attention.kernels.api import (
    QKV,
    diff_attention,
    softmax_attention,
    subtract_noise,
)
from diffmegatron.attention.kernels.registry import (
    ContextCommunication,
    Operation,
    subtraction_backend,
)
from diffmegatron.attention.kinds.layer import Context
from diffmegatron.errors import UserError

Attention = Callable[..., Tensor]


class WholeSequence:
    """The attention functions of a layer, which calls one operation.

    Args:
        group: context-parallel ranks; None is the same as one rank.
        operation: the operation that the layer may call.
        backend: backend of the operation, or ``auto`` to choose in each call.
        subtraction: backend of DIFF V2's subtraction, or ``auto`` for that which goes with
            ``backend``.
        window: number of tokens that a token sees, itself included; None for all before it.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        communication: ContextCommunication,
        operation: Operation,
        backend: str = "auto",
        subtraction: str = "auto",
        window: int | None = None,
    ) -> None:
        self._operation = operation
        kernel = diff_attention if operation == "differential" else softmax_attention
        self._across, self._packed = _functions(kernel, backend, group, communication, window)
        if subtraction == "auto":
            subtraction = subtraction_backend(backend)
        self._subtract = partial(subtract_noise, backend=subtraction)

    def within(self, documents: Tensor | None) -> Context:
        """Return the attention functions for a forward pass.

        Args:
            documents: boundaries of packed documents, 1-dim integers on the CPU; None without
                packing. A boundary is a position in the concatenation of the batch's unsharded
                rows. The first boundary is 0, and the last is the length of this concatenation.
        """
        attend = self._across
        if documents is not None:
            attend = partial(self._packed, documents=documents)
        if self._operation == "differential":
            return Context(partial(self._refuse, "softmax_attention"), attend, self._subtract)
        return Context(attend, partial(self._refuse, "diff_attention"), self._subtract)

    def _refuse(self, name: str, *_: Tensor, **__: Any) -> Tensor:
        raise UserError(
            f"a kind of attention has the operation {self._operation!r} and calls context.{name}; "
            "set the operation of its class to that of the function that forward calls"
        )


def _functions(
    kernel: Attention,
    backend: str,
    group: ProcessGroup | None,
    communication: ContextCommunication,
    window: int | None,
) -> tuple[Attention, Attention]:
    """Return an attention function without packing, and one with the argument ``documents``."""
    attend: Attention = partial(kernel, backend=backend, window=window)
    packed: Attention = partial(in_one_row, attend)
    if group is None or group.size() == 1:
        return attend, packed
    if communication == "ulysses":
        return partial(ulysses_attention, attend, group), partial(ulysses_attention, packed, group)
    across: Attention = partial(gathered_attention, attend, group)
    if communication == "ring":
        across = partial(ring_attention, group, backend, window=window)
    return across, partial(by_row, across)


def in_one_row(attend: Attention, *heads: Tensor, documents: Tensor, **options: Any) -> Tensor:
    """Attend within packed documents: concatenate the batch's rows, and call ``attend`` once."""
    out = attend(*(x.flatten(0, 1)[None] for x in heads), cu_seqlens=documents, **options)
    return out[0].unflatten(0, heads[0].shape[:2])


def by_row(attend: Attention, *heads: Tensor, documents: Tensor, **options: Any) -> Tensor:
    """Attend within packed documents: call ``attend`` once for each row of the batch."""
    rows = zip(*(x.split(1) for x in heads), strict=True)
    bounds = row_boundaries(documents, heads[0].shape[0])
    outs = [
        attend(*row, cu_seqlens=ends, **options) for row, ends in zip(rows, bounds, strict=True)
    ]
    return torch.cat(outs)


def ulysses_attention(
    attend: Attention, group: ProcessGroup, *heads: Tensor, **options: Any
) -> Tensor:
    """Attend over the whole sequence; each rank computes the attention of a range of the heads.

    The method is Ulysses (Jacobs et al., arXiv 2309.14509), with an all-to-all before and after the
    attention. The heads of q, of k and of v are cut into equal ranges, one per rank. The queries in
    a range must attend only to keys and values in the range of the same rank.
    """
    size = group.size()
    shares = [x.transpose(0, 1).unflatten(2, (size, -1)) for x in heads]
    by_rank = torch.cat([x.flatten(3) for x in shares], dim=3).permute(2, 0, 1, 3)
    arrived = to_sequence_order(all_to_all(group, by_rank).flatten(0, 1), size)
    out = attend(*_unpacked(arrived, [x.shape[3:] for x in shares]), **options)
    parts = to_rank_order(out.transpose(0, 1), size).unflatten(0, (size, -1))
    return all_to_all(group, parts).permute(2, 1, 0, 3, 4).flatten(2, 3)


def gathered_attention(
    attend: Attention, group: ProcessGroup, *heads: Tensor, **options: Any
) -> Tensor:
    """Gather all keys and values, and attend with each of this rank's two chunks of queries.

    ``attend`` receives a chunk of queries, all keys and values up to the chunk's end, and
    ``query_offset``, the position of the chunk's first query.
    """
    maps = QKV.of(*heads)
    local = torch.cat([x.transpose(0, 1).flatten(2) for x in (*maps.keys, maps.v)], dim=2)
    shapes = [x.shape[2:] for x in (*maps.keys, maps.v)]
    *keys, v = _unpacked(sequence_of_all_ranks(local, group), shapes)
    length = maps.v.shape[1] // 2
    outs = []
    for half, number in enumerate(rank_chunks(group.rank(), group.size())):
        end = (number + 1) * length
        chunk = QKV(
            tuple(q.chunk(2, dim=1)[half] for q in maps.queries),
            tuple(k[:, :end] for k in keys),
            v[:, :end],
        )
        outs.append(attend(*chunk.arguments(), query_offset=number * length, **options))
    return torch.cat(outs, dim=1)


def sequence_of_all_ranks(local: Tensor, group: ProcessGroup) -> Tensor:
    """Gather the zigzag shards `[s, ...]` of all ranks along dimension 0, in order of positions.

    In the backward pass, each rank receives the sum of all ranks' gradients of its shard.
    """
    by_rank = gather_from_sequence_parallel_region(
        local.contiguous(), tensor_parallel_output_grad=True, group=group
    )
    return to_sequence_order(by_rank, group.size())


def _unpacked(packed: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Split `[s, b, channels]` into one tensor `[b, s, heads, width]` per shape (heads, width)."""
    parts = packed.transpose(0, 1).split([shape.numel() for shape in shapes], dim=2)
    return [part.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)]


def row_boundaries(documents: Tensor, rows: int) -> list[Tensor]:
    """Return the boundaries of documents in each row, as positions from the start of the row.

    ``documents`` has the boundaries as positions in the concatenation of all rows. The end of each
    row must be a boundary.
    """
    length = int(documents[-1]) // rows
    return [
        documents[(documents >= row * length) & (documents <= (row + 1) * length)] - row * length
        for row in range(rows)
    ]
