"""Ring attention: the ranks pass their keys and values around a ring; queries stay on their rank.

It follows Liu et al., arXiv 2310.01889, for one softmax map or for the two maps of differential
attention. Each rank has two chunks of the sequence (see `zigzag`). Attention is computed between a
chunk of queries and a chunk of keys and values, and the results are merged exactly by their
log-sum-exps. While a rank computes, it already receives the keys and values that it needs next.

For the backward pass a rank saves only its own keys and values. The backward pass sends all keys
and values around the ring again, together with their gradients.

Shapes: b is the batch size, s the number of positions on this rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work

from diffmegatron.attention.context_parallel.zigzag import rank_chunks
from diffmegatron.attention.kernels.api import (
    QKV,
    HeadwiseNorm,
    WholeAttention,
    chunk_attention,
    chunk_gradients,
    combine_maps,
    merge_maps,
)
from diffmegatron.attention.kernels.first_order import first_order


def ring_attention(
    group: ProcessGroup,
    backend: str,
    *heads: Tensor,
    lambda_: Tensor | None = None,
    norm: HeadwiseNorm | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return causal attention of this rank's queries over the whole sequence.

    Args:
        group: context-parallel ranks.
        backend: backend (kernel implementation) of attention between two chunks, as in
            `chunk_attention`.
        heads: q, k, v or q1, k1, q2, k2, v of this rank's zigzag shard, `[b, s, heads, width]`
            each.
        lambda_: 0-dim factor of the second map; None with one map.
        cu_seqlens: boundaries of the documents in the whole sequence, `[documents + 1]` integers.

    Returns:
        `[b, s, heads, width]` with the heads of q1 and the width of v, in the dtype of v: the
        output of the only map, or `out1 - lambda out2`; normalised if ``norm`` is given.
    """
    maps = QKV.of(*heads)
    # Keys and values are sent as one tensor [s, b, kv heads, channels]. A kv head has the channels
    # of its key (with two maps, of both keys), followed by the channels of its value.
    packed_kv = torch.cat([x.transpose(0, 1) for x in (*maps.keys, maps.v)], dim=3)
    ring = _Ring(group, backend, cu_seqlens)
    out: Tensor = _RingAttention.apply(ring, lambda_, packed_kv, *maps.queries)
    return out if norm is None else norm.apply_to(out)


class _Ring(NamedTuple):
    """Three arguments of `ring_attention`; ``documents`` is the argument ``cu_seqlens``."""

    group: ProcessGroup
    backend: str
    documents: Tensor | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, lambda_: Tensor | None, packed_kv: Tensor, *queries: Tensor
    ) -> Tensor:
        merged: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for source, received in _circulate(packed_kv, ring.group):
            for pair in _visible_chunk_pairs(queries, received, source, ring):
                parts = chunk_attention(pair.maps, **pair.options)
                before = merged.get(pair.query_chunk)
                merged[pair.query_chunk] = parts if before is None else _merge(before, parts)
        outs, lses = _both_query_chunks(merged)
        second = outs[1].to(packed_kv.dtype) if len(outs) > 1 else None
        whole = WholeAttention(combine_maps(outs, lambda_).to(packed_kv.dtype), second, tuple(lses))
        ctx.save_for_backward(lambda_, packed_kv, whole.out, whole.out2, *queries, *whole.lses)
        ctx.ring = ring
        return whole.out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lambda_, packed_kv, out, out2, *of_maps = ctx.saved_tensors
        count = len(of_maps) // 2
        queries, lses = of_maps[:count], tuple(of_maps[count:])
        ring, whole = ctx.ring, WholeAttention(out, out2, lses)
        query_grads = [torch.zeros_like(q, dtype=lses[0].dtype) for q in queries]
        ring_gradient = _RingGradient(ring.group)
        for source, received in _circulate(packed_kv, ring.group):
            kv_grad = torch.zeros_like(received, dtype=lses[0].dtype)
            for pair in _visible_chunk_pairs(queries, received, source, ring):
                chunk_grad = grad.chunk(2, dim=1)[pair.query_chunk]
                chunk_whole = whole.halves()[pair.query_chunk]
                found = chunk_gradients(chunk_grad, pair.maps, lambda_, chunk_whole, **pair.options)
                for total, part in zip(query_grads, found.queries, strict=True):
                    total.chunk(2, dim=1)[pair.query_chunk].add_(part)
                packed_part = torch.cat([*found.keys, found.v], dim=3).transpose(0, 1)
                kv_grad.chunk(2)[pair.key_chunk].add_(packed_part)
            ring_gradient.add_and_send(kv_grad)
        dpacked_kv = ring_gradient.receive().to(packed_kv.dtype)
        dlambda = None
        if lambda_ is not None:
            dlambda = -whole.deltas(grad, lambda_)[1].sum().to(lambda_.dtype)
        dqueries = (total.to(q.dtype) for total, q in zip(query_grads, queries, strict=True))
        return None, dlambda, dpacked_kv, *dqueries


@dataclass(frozen=True)
class _ChunkPair:
    """A chunk of this rank's queries, and a chunk of keys and values that these queries see.

    The keys and values may come from any rank.

    Attributes:
        query_chunk: number of the query chunk on this rank, 0 or 1.
        key_chunk: number of the key chunk on the rank of the keys, 0 or 1.
        options: positions of the chunks and the backend, as keyword arguments of `chunk_attention`
            and `chunk_gradients`.
    """

    maps: QKV
    query_chunk: int
    key_chunk: int
    options: dict[str, Any]


def _visible_chunk_pairs(
    queries: Sequence[Tensor], packed_kv: Tensor, source: int, ring: _Ring
) -> Iterator[_ChunkPair]:
    """Yield the pairs of a query chunk of this rank and a key chunk of the rank ``source``.

    Pairs in which the queries see no key are left out. ``packed_kv`` has the keys and values of
    ``source``.
    """
    size, length = ring.group.size(), packed_kv.shape[0] // 2
    query_numbers, key_numbers = (rank_chunks(rank, size) for rank in (ring.group.rank(), source))
    width = queries[0].shape[3]
    for query_chunk, query_number in enumerate(query_numbers):
        chunks = tuple(q.chunk(2, dim=1)[query_chunk] for q in queries)
        for key_chunk, key_number in enumerate(key_numbers):
            if key_number > query_number:
                continue
            keys_and_values = packed_kv.chunk(2)[key_chunk].transpose(0, 1)
            *keys, v = keys_and_values.tensor_split(
                [width * n for n in range(1, len(queries) + 1)], dim=3
            )
            options = {
                # A causal mask hides no key of an earlier chunk, and kernels are faster without a
                # mask.
                "causal": query_number == key_number,
                "backend": ring.backend,
                "cu_seqlens": ring.documents,
                "query_offset": query_number * length,
                "key_offset": key_number * length,
            }
            yield _ChunkPair(QKV(chunks, tuple(keys), v), query_chunk, key_chunk, options)


def _merge(
    before: list[tuple[Tensor, Tensor]], parts: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Merge the attention to one more chunk of keys into the result so far.

    Both arguments have one (output, log-sum-exp) per map.
    """
    return [
        merge_maps([out, new_out], [lse, new_lse])
        for (out, lse), (new_out, new_lse) in zip(before, parts, strict=True)
    ]


def _both_query_chunks(
    merged: dict[int, list[tuple[Tensor, Tensor]]],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs and the log-sum-exps of all maps for this rank's two query chunks.

    ``merged`` has one (output, log-sum-exp) per map for each query chunk.
    """
    first, second = ([list(x) for x in zip(*merged[chunk], strict=True)] for chunk in (0, 1))
    outs, lses = (
        [torch.cat(chunks, dim=1) for chunks in zip(*two, strict=True)]
        for two in zip(first, second, strict=True)
    )
    return outs, lses


def _circulate(packed_kv: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield, for every rank of the ring, its number and its keys and values.

    On rank r the order is r, r - 1, r - 2 and so on, modulo the number of ranks. While the caller
    uses the yielded keys and values, the next ones are received.
    """
    size, rank = group.size(), group.rank()
    present = packed_kv.contiguous()
    for hop in range(size):
        if hop + 1 == size:
            yield (rank - hop) % size, present
            return
        following = torch.empty_like(present)
        pending = _send_and_receive(present, following, group)
        yield (rank - hop) % size, present
        _wait(pending)
        present = following


class _RingGradient:
    """Gradients of keys and values on their way around the ring.

    At each hop a rank receives the partial gradient of another rank's keys and values, adds the
    contribution of its own queries, and sends the sum to the next rank.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._incoming: Tensor | None = None
        self._sent: Tensor | None = None
        self._pending: list[Work] = []

    def add_and_send(self, part: Tensor) -> None:
        """Add ``part`` to the received partial gradient, and start to send the sum.

        ``part`` is the contribution of this rank's queries. The first call sends it alone.
        """
        total = part if self._incoming is None else part + self.receive()
        self._sent = total
        self._incoming = torch.empty_like(total)
        self._pending = _send_and_receive(total, self._incoming, self._group)

    def receive(self) -> Tensor:
        """Wait for the gradient that the previous rank sent, and return it.

        If `add_and_send` was called once per rank, the gradient is the complete gradient of this
        rank's own keys and values.
        """
        assert self._incoming is not None
        _wait(self._pending)
        return self._incoming


def _send_and_receive(outgoing: Tensor, incoming: Tensor, group: ProcessGroup) -> list[Work]:
    """Start to send to the next rank of the ring, and to receive from the previous rank."""
    size, rank = group.size(), group.rank()
    following, previous = (
        distributed.get_global_rank(group, (rank + step) % size) for step in (1, -1)
    )
    return distributed.batch_isend_irecv(
        [
            P2POp(distributed.isend, outgoing, following, group),
            P2POp(distributed.irecv, incoming, previous, group),
        ]
    )


def _wait(pending: list[Work]) -> None:
    for work in pending:
        work.wait()
