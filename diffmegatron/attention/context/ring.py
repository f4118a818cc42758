"""Ring attention: keys and values travel from rank to rank and meet each rank's queries.

Liu et al., arXiv 2310.01889, for any number of softmax maps. A map's attention over the whole
sequence is merged exactly from its attention over each pair of chunks by their log-sum-exps; while
one part is attended to, the next is on its way. A rank keeps its own keys and values only: in the
backward pass they travel again, and their gradients with them, and each chunk's attention is
computed again on the way.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import P2POp, ProcessGroup, Work

from diffmegatron.attention.context.zigzag import rank_chunks
from diffmegatron.attention.kernels import merge_maps

# query [s, b, heads, d], key, value -> the maps' (q, k, v), rows first: [b, s, heads, width]
SplitMaps = Callable[[Tensor, Tensor, Tensor], list[tuple[Tensor, Tensor, Tensor]]]
# (q, k, v, first query position, first key position) -> (out [b, s, h, e], log-sum-exp [b, s, h])
AttendPair = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Ring:
    """What ring attention needs to know beside its tensors.

    Attributes:
        group: the context-parallel ranks.
        split: takes a part of query, key and value apart into maps.
        attend: causal attention of one map between two chunks, by their global positions; float32
            and differentiable.
    """

    group: ProcessGroup
    split: SplitMaps
    attend: AttendPair


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> tuple[Tensor, ...]:
    """Causal attention of this rank's queries over the whole sequence, map by map.

    Args:
        query: [s, b, heads, d], this rank's zigzag part.
        key: [s, b, kv heads, d], likewise; value has the same shape.
        ring: who takes part, and what the maps are.

    Returns:
        One float32 [b, s, h, e] per map.
    """
    outs: tuple[Tensor, ...] = _RingAttention.apply(query, torch.stack([key, value]), ring)
    return outs


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, pair: Tensor, ring: Ring) -> tuple[Tensor, ...]:
        merged: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for source, arrived in _circulate(pair, ring.group):
            for meeting in _meetings(query, arrived, source, ring.group):
                parts = _attend(meeting, ring)
                before = merged.get(meeting.half)
                merged[meeting.half] = parts if before is None else _merge(before, parts)
        both = zip(merged[0], merged[1], strict=True)
        maps = [[torch.cat(halves, dim=1) for halves in zip(*two, strict=True)] for two in both]
        outs, lses = [out for out, _ in maps], [lse for _, lse in maps]
        ctx.save_for_backward(query, pair, *outs, *lses)
        ctx.ring = ring
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, pair, *saved = ctx.saved_tensors
        ring = ctx.ring
        outs, lses = saved[: len(grads)], saved[len(grads) :]
        halves = [
            [(grad, out, lse) for grad, out, lse in zip(*parts, strict=True)]
            for parts in zip(*(_by_half(tensors) for tensors in (grads, outs, lses)), strict=True)
        ]
        query_grad = torch.zeros_like(query, dtype=outs[0].dtype)
        travelling = _TravellingGradient(ring.group)
        for source, arrived in _circulate(pair, ring.group):
            pair_grad = torch.zeros_like(arrived, dtype=outs[0].dtype)
            for meeting in _meetings(query, arrived, source, ring.group):
                dquery, dpair = _meeting_gradient(meeting, halves[meeting.half], ring)
                query_grad.chunk(2)[meeting.half].add_(dquery)
                pair_grad.chunk(2, dim=1)[meeting.their_half].add_(dpair)
            travelling.add_and_pass_on(pair_grad)
        return query_grad.to(query.dtype), travelling.arrived_home().to(pair.dtype), None


@dataclass(frozen=True)
class _Meeting:
    """A query chunk of this rank with a visible chunk of keys and values, ``pair`` [2, c, ...]."""

    query: Tensor
    pair: Tensor
    half: int
    their_half: int
    query_start: int
    key_start: int


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


def _attend(meeting: _Meeting, ring: Ring) -> list[tuple[Tensor, Tensor]]:
    key, value = meeting.pair
    return [
        ring.attend(*tensors, meeting.query_start, meeting.key_start)
        for tensors in ring.split(meeting.query, key, value)
    ]


def _meeting_gradient(
    meeting: _Meeting, merged: list[tuple[Tensor, Tensor, Tensor]], ring: Ring
) -> tuple[Tensor, Tensor]:
    """Gradients of a meeting's query chunk and of its keys and values.

    With w = exp(lse_part - lse) the merged output is the sum of w out_part, so a part's output has
    gradient w dout, and its log-sum-exp w dout . (out_part - out).

    Args:
        meeting: the chunks.
        merged: (dout, out, lse) of the query chunk, map by map.
        ring: how the part was computed.
    """
    query, pair = (x.detach().requires_grad_() for x in (meeting.query, meeting.pair))
    with torch.enable_grad():
        again = _Meeting(query, pair, 0, 0, meeting.query_start, meeting.key_start)
        parts = _attend(again, ring)
    tensors, gradients = [], []
    for (part_out, part_lse), (grad, out, lse) in zip(parts, merged, strict=True):
        weight = (part_lse.detach() - lse).exp()
        of_out = weight.unsqueeze(-1) * grad
        tensors += [part_out, part_lse]
        gradients += [of_out, (of_out * (part_out.detach() - out)).sum(-1)]
    dquery, dpair = torch.autograd.grad(tensors, [query, pair], gradients)
    return dquery, dpair


def _merge(
    before: list[tuple[Tensor, Tensor]], parts: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """Every map's attention over the chunks met before and one more."""
    return [
        merge_maps([out, new_out], [lse, new_lse])
        for (out, lse), (new_out, new_lse) in zip(before, parts, strict=True)
    ]


def _by_half(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[list[Tensor]]:
    """[b, s, ...] of every map as the two halves, each a list over the maps."""
    return [[tensor.chunk(2, dim=1)[half] for tensor in tensors] for half in (0, 1)]


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
