"""Ring attention: keys and values travel from rank to rank and meet each rank's queries.

Liu et al., arXiv 2310.01889, for one softmax map or differential attention's two. Attention over
the whole sequence is merged exactly from that of each pair of chunks, by the maps' log-sum-exps;
while one part is attended to, the next is on its way. A rank keeps its own keys and values only: in
the backward pass they travel again, and their gradients with them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import P2POp, ProcessGroup, Work

from diffmegatron.attention.context_parallel.zigzag import rank_chunks
from diffmegatron.attention.kernels.api import (
    QKV,
    WholeAttention,
    chunk_attention,
    chunk_gradients,
    combine_maps,
    merge_maps,
)
from diffmegatron.attention.kernels.first_order import first_order

# query [s, b, heads, d], key, value -> the maps, rows first: [b, s, heads, width]
SplitMaps = Callable[[Tensor, Tensor, Tensor], QKV]


@dataclass(frozen=True)
class Ring:
    """What ring attention needs to know beside its tensors.

    Attributes:
        group: the context-parallel ranks.
        split: takes a part of query, key and value apart into maps.
        softmax_scale: factor of the scores; None for 1/sqrt(d).
        backend: what computes a pair of chunks, as in `chunk_attention`.
        documents: boundaries of the sequence's documents, [documents + 1] integers, or None.
    """

    group: ProcessGroup
    split: SplitMaps
    softmax_scale: float | None
    backend: str
    documents: Tensor | None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor | None, ring: Ring
) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence.

    Args:
        query: [s, b, heads, d], this rank's zigzag part.
        key: [s, b, kv heads, d], likewise; value has the same shape.
        lambda_: 0-dim; None where there is one map.
        ring: who takes part, and what the maps are.

    Returns:
        [b, s, h, e], the first map's values less lambda times the second's, in ``query``'s dtype.
    """
    out: Tensor = _RingAttention.apply(query, torch.stack([key, value]), lambda_, ring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, pair: Tensor, lambda_: Tensor | None, ring: Ring
    ) -> Tensor:
        merged: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for source, arrived in _circulate(pair, ring.group):
            for meeting in _meetings(query, arrived, source, ring.group):
                parts = chunk_attention(meeting.maps(ring), **meeting.options(ring))
                before = merged.get(meeting.half)
                merged[meeting.half] = parts if before is None else _merge(before, parts)
        outs, lses = _both_halves(merged)
        second = outs[1].to(query.dtype) if len(outs) > 1 else None
        whole = WholeAttention(combine_maps(outs, lambda_).to(query.dtype), second, tuple(lses))
        ctx.save_for_backward(query, pair, lambda_, whole.out, whole.out2, *whole.lses)
        ctx.ring = ring
        return whole.out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, lambda_, out, out2, *lses = ctx.saved_tensors
        ring, whole = ctx.ring, WholeAttention(out, out2, tuple(lses))
        query_grad = torch.zeros_like(query, dtype=lses[0].dtype)
        travelling = _TravellingGradient(ring.group)
        for source, arrived in _circulate(pair, ring.group):
            pair_grad = torch.zeros_like(arrived, dtype=lses[0].dtype)
            for meeting in _meetings(query, arrived, source, ring.group):
                dquery, dpair = _meeting_gradient(meeting, grad, lambda_, whole, ring)
                query_grad.chunk(2)[meeting.half].add_(dquery)
                pair_grad.chunk(2, dim=1)[meeting.their_half].add_(dpair)
            travelling.add_and_pass_on(pair_grad)
        dpair = travelling.arrived_home().to(pair.dtype)
        dlambda = None
        if lambda_ is not None:
            dlambda = -whole.deltas(grad, lambda_)[1].sum().to(lambda_.dtype)
        return query_grad.to(query.dtype), dpair, dlambda, None


@dataclass(frozen=True)
class _Meeting:
    """A query chunk of this rank with a visible chunk of keys and values, ``pair`` [2, c, ...]."""

    query: Tensor
    pair: Tensor
    half: int
    their_half: int
    query_start: int
    key_start: int

    def maps(self, ring: Ring) -> QKV:
        return ring.split(self.query, *self.pair)

    def options(self, ring: Ring) -> dict[str, Any]:
        """What the kernels are told of where the two chunks lie."""
        return {
            # An earlier chunk has no later keys, and kernels are faster without a mask.
            "causal": self.query_start == self.key_start,
            "softmax_scale": ring.softmax_scale,
            "backend": ring.backend,
            "cu_seqlens": ring.documents,
            "query_offset": self.query_start,
            "key_offset": self.key_start,
        }


def _meetings(query: Tensor, pair: Tensor, source: int, group: ProcessGroup) -> Iterator[_Meeting]:
    """The pairs of chunks, of this rank and of ``source``, that the causal mask does not part."""
    length = query.shape[0] // 2
    mine, theirs = (rank_chunks(rank, group.size()) for rank in (group.rank(), source))
    queries, pairs = query.chunk(2), pair.chunk(2, dim=1)
    for half, number in enumerate(mine):
        for their_half, their_number in enumerate(theirs):
            if their_number <= number:
                yield _Meeting(
                    queries[half], pairs[their_half], half, their_half,
                    number * length, their_number * length,
                )  # fmt: skip


def _meeting_gradient(
    meeting: _Meeting, grad: Tensor, lambda_: Tensor | None, whole: WholeAttention, ring: Ring
) -> tuple[Tensor, Tensor]:
    """Gradients of a meeting's query chunk and of its keys and values, from the whole's ``grad``.

    Those of the maps go back to where ``ring.split`` took the maps from.
    """
    query, pair = (x.detach().requires_grad_() for x in (meeting.query, meeting.pair))
    with torch.enable_grad():
        maps = ring.split(query, *pair)
    half_grad = grad.chunk(2, dim=1)[meeting.half]
    half_whole = whole.halves()[meeting.half]
    gradients = chunk_gradients(half_grad, maps, lambda_, half_whole, **meeting.options(ring))
    dquery, dpair = torch.autograd.grad(
        [*maps.queries, *maps.keys, maps.v],
        [query, pair],
        [*gradients.queries, *gradients.keys, gradients.v],
    )
    return dquery, dpair


def _merge(
    before: list[tuple[Tensor, Tensor]], parts: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Every map's attention over the chunks met before and one more."""
    return [
        merge_maps([out, new_out], [lse, new_lse])
        for (out, lse), (new_out, new_lse) in zip(before, parts, strict=True)
    ]


def _both_halves(
    merged: dict[int, list[tuple[Tensor, Tensor]]],
) -> tuple[list[Tensor], list[Tensor]]:
    """(outs, log-sum-exps), each map's from both halves of this rank's rows."""
    first, second = ([list(x) for x in zip(*merged[half], strict=True)] for half in (0, 1))
    outs, lses = (
        [torch.cat(halves, dim=1) for halves in zip(*two, strict=True)]
        for two in zip(first, second, strict=True)
    )
    return outs, lses


def _circulate(pair: Tensor, group: ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """Every rank's keys and values and whose they are, this rank's first.

    The next are on their way while the present ones are worked on.
    """
    size, rank = group.size(), group.rank()
    present = pair.contiguous()
    for hop in range(size):
        if hop + 1 == size:
            yield (rank - hop) % size, present
            return
        following = torch.empty_like(present)
        pending = _pass_on(present, following, group)
        yield (rank - hop) % size, present
        _wait(pending)
        present = following


class _TravellingGradient:
    """The gradient of keys and values that go round; each rank adds its part and passes it on."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._arriving: Tensor | None = None
        self._sent: Tensor | None = None
        self._pending: list[Work] = []

    def add_and_pass_on(self, part: Tensor) -> None:
        """Add to what arrived with the keys and values just worked on."""
        total = part if self._arriving is None else part + self.arrived_home()
        self._sent = total
        self._arriving = torch.empty_like(total)
        self._pending = _pass_on(total, self._arriving, self._group)

    def arrived_home(self) -> Tensor:
        """What the last rank passed on; after the last hop that is this rank's own gradient."""
        assert self._arriving is not None
        _wait(self._pending)
        return self._arriving


def _pass_on(outgoing: Tensor, incoming: Tensor, group: ProcessGroup) -> list[Work]:
    """Begin to send to the next rank and to receive from the one before."""
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
