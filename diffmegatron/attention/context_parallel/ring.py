"""Ring attention: the ranks pass their keys and values around a ring; queries stay on their rank.

The method is that of Liu et al., arXiv 2310.01889, for one or two softmax maps. Each rank computes
the attention of its queries to one rank's keys while it receives another rank's keys. Results are
merged exactly by their log-sum-exps. In the backward pass the keys and values go around the ring
again, so a rank saves only its own keys and values.

With a window, a rank instead sends its chunks of keys and values directly to the ranks whose
queries see them, and receives their gradients from these ranks. Other chunks are neither sent nor
computed.

In shapes b is the batch size, s the number of positions on this rank, and d the width of a query.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work

from diffmegatron.attention.context_parallel.chunk_numbers import (
    chunks_before,
    rank_chunks,
    seen_chunks,
)
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
    window: int | None = None,
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
        window: number of positions that a query sees, its own included; None for all before it.
    """
    maps = QKV.of(*heads)
    # Keys and values are sent as one tensor [s, b, kv heads, channels]. A kv head has the channels
    # of its key (with two maps, of both keys), followed by the channels of its value.
    packed_kv = torch.cat([x.transpose(0, 1) for x in (*maps.keys, maps.v)], dim=3)
    if window is not None and window >= group.size() * heads[0].shape[1]:
        window = None  # It hides nothing, and all ranks need all chunks.
    ring = _Ring(group, backend, cu_seqlens, window)
    out: Tensor = _RingAttention.apply(ring, lambda_, packed_kv, *maps.queries)
    return out if norm is None else norm.apply_to(out)


class _Ring(NamedTuple):
    group: ProcessGroup
    backend: str
    cu_seqlens: Tensor | None
    window: int | None


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, lambda_: Tensor | None, packed_kv: Tensor, *queries: Tensor
    ) -> Tensor:
        # Chunk of queries (0 or 1) -> output and log-sum-exp of each map.
        merged: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for received in _received(packed_kv, ring):
            for pair in _visible_chunk_pairs(queries, received, ring):
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
        gradient: _RelayedGradient | _ReturnedGradient = _RelayedGradient(ring.group)
        if ring.window is not None:
            gradient = _ReturnedGradient(ring, packed_kv.shape[0] // 2)
        for received in _received(packed_kv, ring):
            kv_grad = torch.zeros_like(received.packed_kv, dtype=lses[0].dtype)
            for pair in _visible_chunk_pairs(queries, received, ring):
                chunk_grad = grad.chunk(2, dim=1)[pair.query_chunk]
                chunk_whole = whole.halves()[pair.query_chunk]
                found = chunk_gradients(chunk_grad, pair.maps, lambda_, chunk_whole, **pair.options)
                for total, part in zip(query_grads, found.queries, strict=True):
                    total.chunk(2, dim=1)[pair.query_chunk].add_(part)
                packed_part = torch.cat([*found.keys, found.v], dim=3).transpose(0, 1)
                kv_grad.chunk(len(received.chunks))[pair.place].add_(packed_part)
            gradient.add(kv_grad)
        dlambda = None
        if lambda_ is not None:
            dlambda = -whole.deltas(grad, lambda_)[1].sum().to(lambda_.dtype)
        dqueries = (total.to(q.dtype) for total, q in zip(query_grads, queries, strict=True))
        return None, dlambda, gradient.total().to(packed_kv.dtype), *dqueries


class _Received(NamedTuple):
    """Keys and values of the rank ``source``: its ``chunks`` (0, 1 or both), one after the other.

    The shape of ``packed_kv`` is [positions, b, kv heads, channels].
    """

    source: int
    chunks: tuple[int, ...]
    packed_kv: Tensor


class _ChunkPair(NamedTuple):
    """A chunk of this rank's queries, with a chunk of keys and values that is visible to them.

    ``query_chunk`` is 0 or 1: the first or the second chunk of this rank. ``place`` is the index of
    the keys in `_Received.chunks`. ``options`` are keyword arguments of `chunk_attention` in
    kernels/chunks.py.
    """

    maps: QKV
    query_chunk: int
    place: int
    options: dict[str, Any]


def _visible_chunk_pairs(
    queries: Sequence[Tensor], received: _Received, ring: _Ring
) -> Iterator[_ChunkPair]:
    """Yield each chunk of this rank's queries with each received chunk of keys that it sees.

    These chunks are not later, and with a window not entirely before it.
    """
    size, length = ring.group.size(), queries[0].shape[1] // 2
    before = chunks_before(ring.window, length, size)
    key_numbers = rank_chunks(received.source, size)
    width = queries[0].shape[3]
    for query_chunk, query_number in enumerate(rank_chunks(ring.group.rank(), size)):
        chunks = tuple(q.chunk(2, dim=1)[query_chunk] for q in queries)
        for place, key_chunk in enumerate(received.chunks):
            distance = query_number - key_numbers[key_chunk]
            if not 0 <= distance <= before:
                continue
            packed_kv = received.packed_kv.chunk(len(received.chunks))[place]
            *keys, v = packed_kv.transpose(0, 1).tensor_split(
                [width * n for n in range(1, len(queries) + 1)], dim=3
            )
            # A chunk that a window does not cut needs no window. If it is an earlier one, it also
            # needs no causal mask, and kernels without masks are faster.
            is_cut = ring.window is not None and (distance + 1) * length > ring.window
            options = {
                "causal": distance == 0 or is_cut,
                "window": ring.window if is_cut else None,
                "backend": ring.backend,
                "cu_seqlens": ring.cu_seqlens,
                "query_offset": query_number * length,
                "key_offset": key_numbers[key_chunk] * length,
            }
            yield _ChunkPair(QKV(chunks, tuple(keys), v), query_chunk, place, options)


def _received(packed_kv: Tensor, ring: _Ring) -> Iterator[_Received]:
    """Yield this rank's keys and values, and then those that arrive from every other rank.

    The next ones arrive while the caller uses the yielded ones.
    """
    return _circulate(packed_kv, ring.group) if ring.window is None else _direct(packed_kv, ring)


def _circulate(packed_kv: Tensor, group: ProcessGroup) -> Iterator[_Received]:
    """Yield the keys and values of the ranks r, r - 1, r - 2, ... around the ring, on rank r."""
    size, rank = group.size(), group.rank()
    present = packed_kv.contiguous()
    for hop in range(size - 1):
        following = torch.empty_like(present)
        pending = send_and_receive(present, following, group)
        yield _Received((rank - hop) % size, (0, 1), present)
        _wait(pending)
        present = following
    yield _Received((rank + 1) % size, (0, 1), present)


def _direct(packed_kv: Tensor, ring: _Ring) -> Iterator[_Received]:
    """Yield the chunks of the ranks r, r - 1, r - 2, ... that rank r sees through its window.

    A rank of which rank r sees no chunk has an empty tensor.
    """
    group, own = ring.group, packed_kv.chunk(2)
    size, rank = group.size(), group.rank()
    before = chunks_before(ring.window, len(own[0]), size)
    present = _Received(rank, (0, 1), packed_kv)
    for hop in range(1, size):
        source, target = (rank - hop) % size, (rank + hop) % size
        arriving = seen_chunks(source, rank, size, before)
        leaving = seen_chunks(rank, target, size, before)
        # This name keeps the outgoing tensor alive until it is sent.
        outgoing = torch.cat([packed_kv[:0], *(own[chunk] for chunk in leaving)])
        incoming = packed_kv.new_empty(len(arriving) * len(own[0]), *packed_kv.shape[1:])
        pending = _exchange(outgoing, target, incoming, source, group)
        yield present
        _wait(pending)
        present = _Received(source, arriving, incoming)
    yield present


class _RelayedGradient:
    """Gradient of keys and values, which goes around the ring with them.

    Each rank adds its part, and the owner of the keys and values receives the sum.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        # `_leaving` keeps the outgoing tensor alive until it is sent.
        self._leaving: Tensor | None = None
        self._arriving: Tensor | None = None
        self._pending: list[Work] = []

    def add(self, part: Tensor) -> None:
        """Add the gradient of the next received keys and values, and pass the sum on."""
        _wait(self._pending)
        self._leaving = part if self._arriving is None else part + self._arriving
        self._arriving = torch.empty_like(self._leaving)
        self._pending = send_and_receive(self._leaving, self._arriving, self._group)

    def total(self) -> Tensor:
        """Return the gradient of this rank's keys and values."""
        _wait(self._pending)
        assert self._arriving is not None
        return self._arriving


class _ReturnedGradient:
    """Gradient of keys and values, whose parts the other ranks send back to their owner."""

    def __init__(self, ring: _Ring, length: int) -> None:
        self._group, self._length, self._hop = ring.group, length, 0
        self._before = chunks_before(ring.window, length, ring.group.size())
        self._total: Tensor | None = None
        # `_leaving` keeps the outgoing tensor alive until it is sent.
        self._leaving: Tensor | None = None
        self._arriving: tuple[tuple[int, ...], Tensor] | None = None
        self._pending: list[Work] = []

    def add(self, part: Tensor) -> None:
        """Send the gradient of the next received keys and values back, or add this rank's own."""
        if self._total is None:
            self._total = part
            return
        self._receive()
        self._hop += 1
        rank, size = self._group.rank(), self._group.size()
        source, target = (rank - self._hop) % size, (rank + self._hop) % size
        chunks = seen_chunks(rank, target, size, self._before)
        incoming = part.new_empty(len(chunks) * self._length, *part.shape[1:])
        self._leaving, self._arriving = part, (chunks, incoming)
        self._pending = _exchange(part, source, incoming, target, self._group)

    def total(self) -> Tensor:
        """Return the gradient of this rank's keys and values."""
        self._receive()
        assert self._total is not None
        return self._total

    def _receive(self) -> None:
        _wait(self._pending)
        self._pending = []
        if self._arriving is None or self._total is None:
            return
        chunks, parts = self._arriving
        for place, chunk in enumerate(chunks):
            self._total.chunk(2)[chunk].add_(parts.chunk(len(chunks))[place])
        self._arriving = None


def send_and_receive(outgoing: Tensor, incoming: Tensor, group: ProcessGroup) -> list[Work]:
    """Start to send to the next rank of the ring, and to receive from the previous rank.

    In a ring of one rank, ``incoming`` becomes a copy of ``outgoing``.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        incoming.copy_(outgoing)
        return []
    return _exchange(outgoing, (rank + 1) % size, incoming, (rank - 1) % size, group)


def _exchange(
    outgoing: Tensor, target: int, incoming: Tensor, source: int, group: ProcessGroup
) -> list[Work]:
    """Start to send to a rank of the group and to receive from another; skip empty tensors."""
    operations = [
        P2POp(function, tensor, distributed.get_global_rank(group, rank), group)
        for function, tensor, rank in (
            (distributed.isend, outgoing, target),
            (distributed.irecv, incoming, source),
        )
        if tensor.numel() > 0
    ]
    return distributed.batch_isend_irecv(operations) if operations else []


def _wait(pending: list[Work]) -> None:
    for work in pending:
        work.wait()
