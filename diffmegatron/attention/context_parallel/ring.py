"""Ring attention: the ranks pass their keys and values around a ring; queries stay on their rank.

The method is that of Liu et al., arXiv 2310.01889, for one or two softmax maps. Each rank computes
the attention of its queries to one rank's keys while it receives another rank's keys. Results are
merged exactly by their log-sum-exps. In the backward pass the keys and values go around the ring
again, so a rank saves only its own keys and values.

In shapes b is the batch size, s the number of positions on this rank, and d the width of a query.
"""

from collections.abc import Iterator, Sequence
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

    With one map, the result is softmax(Q K^T / sqrt(d)) V. With two maps, it is
    (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V. The shape of the result is
    `[b, s, heads of q or q1, width of v]`, and the dtype is that of v.

    Args:
        backend: "auto", or a key of SOFTMAX (one map) or DIFFERENTIAL (two) in kernels/registry.py.
        heads: q, k, v or q1, k1, q2, k2, v of this rank's zigzag shard, `[b, s, heads, width]`.
        lambda_: 0-dim factor of the second map; None with one map.
        norm: headwise RMSNorm to apply to the result.
        cu_seqlens: boundaries of the documents in the whole sequence, `[documents + 1]` integers;
            None without packing.
    """
    maps = QKV.of(*heads)
    # Keys and values are sent as one tensor [s, b, kv heads, channels]. A kv head has the channels
    # of its key (with two maps, of both keys), followed by the channels of its value.
    packed_kv = torch.cat([x.transpose(0, 1) for x in (*maps.keys, maps.v)], dim=3)
    ring = _Ring(group, backend, cu_seqlens)
    out: Tensor = _RingAttention.apply(ring, lambda_, packed_kv, *maps.queries)
    return out if norm is None else norm.apply_to(out)


class _Ring(NamedTuple):
    group: ProcessGroup
    backend: str
    cu_seqlens: Tensor | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, lambda_: Tensor | None, packed_kv: Tensor, *queries: Tensor
    ) -> Tensor:
        # Chunk of queries (0 or 1) -> output and log-sum-exp of each map.
        merged: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for source, received in _circulate(packed_kv, ring.group):
            for pair in _visible_chunk_pairs(queries, received, source, ring):
                parts = chunk_attention(pair.maps, **pair.options)
                if pair.query_chunk in merged:
                    parts = [
                        merge_maps([out, new_out], [lse, new_lse])
                        for (out, lse), (new_out, new_lse) in zip(
                            merged[pair.query_chunk], parts, strict=True
                        )
                    ]
                merged[pair.query_chunk] = parts
        whole_maps = [
            [torch.cat(halves, dim=1) for halves in zip(*both_chunks, strict=True)]
            for both_chunks in zip(merged[0], merged[1], strict=True)
        ]
        outs, lses = zip(*whole_maps, strict=True)
        second = outs[1].to(packed_kv.dtype) if len(outs) > 1 else None
        whole = WholeAttention(combine_maps(outs, lambda_).to(packed_kv.dtype), second, lses)
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
        # The gradient of keys and values goes around the ring with the keys and values. Each rank
        # adds its part, and the owner of the keys and values receives the sum. `sent` keeps the
        # outgoing tensor alive until it is sent.
        sent: Tensor | None = None
        arriving: Tensor | None = None
        pending: list[Work] = []
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
            _wait(pending)
            sent = kv_grad if arriving is None else kv_grad + arriving
            arriving = torch.empty_like(sent)
            pending = send_and_receive(sent, arriving, ring.group)
        _wait(pending)
        assert arriving is not None
        dlambda = None
        if lambda_ is not None:
            dlambda = -whole.deltas(grad, lambda_)[1].sum().to(lambda_.dtype)
        dqueries = (total.to(q.dtype) for total, q in zip(query_grads, queries, strict=True))
        return None, dlambda, arriving.to(packed_kv.dtype), *dqueries


class _ChunkPair(NamedTuple):
    """A chunk of this rank's queries, with a chunk of keys and values that is visible to them.

    ``query_chunk`` and ``key_chunk`` are 0 or 1: the first or the second chunk of a rank.
    ``options`` are keyword arguments of `chunk_attention` in kernels/chunks.py.
    """

    maps: QKV
    query_chunk: int
    key_chunk: int
    options: dict[str, Any]


def _visible_chunk_pairs(
    queries: Sequence[Tensor], packed_kv: Tensor, source: int, ring: _Ring
) -> Iterator[_ChunkPair]:
    """Yield each chunk of this rank's queries with each chunk of keys that is not later.

    ``packed_kv`` has the keys and values of the rank ``source``.
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
                # An earlier chunk of keys needs no causal mask, and kernels without one are faster.
                "causal": query_number == key_number,
                "backend": ring.backend,
                "cu_seqlens": ring.cu_seqlens,
                "query_offset": query_number * length,
                "key_offset": key_number * length,
            }
            yield _ChunkPair(QKV(chunks, tuple(keys), v), query_chunk, key_chunk, options)


def _circulate(packed_kv: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of every rank with its keys and values.

    On rank r the order is r, r - 1, r - 2, ... around the ring. The next keys and values arrive
    while the caller uses the yielded keys and values.
    """
    size, rank = group.size(), group.rank()
    present = packed_kv.contiguous()
    for hop in range(size - 1):
        following = torch.empty_like(present)
        pending = send_and_receive(present, following, group)
        yield (rank - hop) % size, present
        _wait(pending)
        present = following
    yield (rank + 1) % size, present


def send_and_receive(outgoing: Tensor, incoming: Tensor, group: ProcessGroup) -> list[Work]:
    """Start to send to the next rank of the ring, and to receive from the previous rank.

    In a ring of one rank, ``incoming`` becomes a copy of ``outgoing``.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        incoming.copy_(outgoing)
        return []
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
