"""Attention to the whole sequence, whichever ranks hold it: the one place that variants call.

What is computed is one of two operations: ordinary attention, or differential attention's two maps
over values twice as wide. Each knows how to compute a whole call and how to take a part of queries,
keys and values apart into maps, of which a ring is made.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from diffmegatron.attention.context_parallel.gather import gathered_attention
from diffmegatron.attention.context_parallel.ring import Ring, ring_attention
from diffmegatron.attention.context_parallel.ulysses import ulysses_attention
from diffmegatron.attention.kernels.api import QKV, HeadwiseNorm, diff_attention, softmax_attention
from diffmegatron.attention.variants.base import ContextCommunication


class _Positions(TypedDict):
    """Ends of documents in the rows, and the position of the first query where keys begin at 0."""

    cu_seqlens: Tensor | None
    query_offset: int | None


class _Operation(ABC):
    """What is computed between the queries and the keys of some rows [b, length, heads, d]."""

    lambda_: Tensor | None
    backend: str

    @abstractmethod
    def maps(self, query: Tensor, key: Tensor, value: Tensor) -> QKV:
        """The softmax maps, and the values they share."""

    @abstractmethod
    def whole(
        self, query: Tensor, key: Tensor, value: Tensor, **positions: Unpack[_Positions]
    ) -> Tensor:
        """Finished heads [b, s, h, e] of queries that end where the keys end."""

    def finish(self, heads: Tensor) -> Tensor:
        """What is left to do where the maps were computed apart."""
        return heads


class _Softmax(_Operation):
    lambda_ = None
    # The recipe's backend is one of differential attention.
    backend = "auto"

    def maps(self, query: Tensor, key: Tensor, value: Tensor) -> QKV:
        return QKV((query,), (key,), value)

    def whole(
        self, query: Tensor, key: Tensor, value: Tensor, **positions: Unpack[_Positions]
    ) -> Tensor:
        return softmax_attention(query, key, value, **positions)


@dataclass
class _Differential(_Operation):
    lambda_: Tensor | None
    backend: str
    signal_per_noise: int
    norm: HeadwiseNorm | None

    def maps(self, query: Tensor, key: Tensor, value: Tensor) -> QKV:
        """By blocks: signal queries, noise queries; k1, k2; the two halves of the value."""
        blocks = key.shape[2] // 2
        noise = query.shape[2] // blocks // (self.signal_per_noise + 1)
        q1, q2 = query.unflatten(2, (blocks, -1)).split([self.signal_per_noise * noise, noise], 3)
        k1, k2 = key.unflatten(2, (blocks, 2)).unbind(3)
        v = value.unflatten(2, (blocks, 2)).flatten(3)
        q1, q2 = q1.flatten(2, 3), q2.flatten(2, 3)
        if self.signal_per_noise > 1:
            # A view of the noise heads would keep the signal heads, of which q1 is a copy.
            q2 = q2.contiguous()
        return QKV((q1, q2), (k1, k2), v)

    def whole(
        self, query: Tensor, key: Tensor, value: Tensor, **positions: Unpack[_Positions]
    ) -> Tensor:
        (q1, q2), (k1, k2), v = self.maps(query, key, value)
        assert self.lambda_ is not None
        return diff_attention(
            q1, k1, q2, k2, v, self.lambda_, backend=self.backend, norm=self.norm, **positions
        )

    def finish(self, heads: Tensor) -> Tensor:
        return heads if self.norm is None else self.norm.apply_to(heads)


@dataclass(frozen=True)
class SequenceContext:
    """Causal attention of this rank's queries to the whole sequence.

    Attributes:
        group: the ranks that share the sequence; None, or one of them: it is all here.
        communication: how they do: `ring`, `all_gather` or `ulysses`.
        backend: what computes differential attention, ``auto`` or a name that ``doctor`` lists.
        documents: None, or the ends of packed documents: [documents + 1] integers on the CPU, in
            the batch's whole rows laid end to end; attention then stays within one.
    """

    group: ProcessGroup | None
    communication: ContextCommunication
    backend: str
    documents: Tensor | None

    def softmax(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Ordinary attention, by torch's kernels: [s, b, heads, d] from [s, b, heads, d] each."""
        return self._attend(_Softmax(), query, key, value)

    def differential(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lambda_: Tensor,
        *,
        signal_per_noise: int,
        norm: HeadwiseNorm | None,
    ) -> Tensor:
        """Differential attention, as :class:`~diffmegatron.attention.variants.base.Context`."""
        operation = _Differential(lambda_, self.backend, signal_per_noise, norm)
        return self._attend(operation, query, key, value)

    def _attend(self, operation: _Operation, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.group is None or self.group.size() == 1:
            return self._whole(operation, query, key, value, self.documents)
        if self.communication == "ulysses":
            return ulysses_attention(
                query,
                key,
                value,
                self.group,
                lambda q, k, v: self._whole(operation, q, k, v, self.documents),
            )
        attend = self._ring if self.communication == "ring" else self._gathered
        if self.documents is None:
            return attend(operation, query, key, value, None)
        # Each row has its own documents, and its positions begin at 0.
        bounds = row_boundaries(self.documents, query.shape[1])
        rows = zip(*(x.split(1, dim=1) for x in (query, key, value)), bounds, strict=True)
        return torch.cat([attend(operation, q, k, v, ends) for q, k, v, ends in rows], dim=1)

    def _whole(
        self,
        operation: _Operation,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        query_offset: int | None = None,
    ) -> Tensor:
        length, batch = query.shape[:2]
        q, k, v = (_rows(x, documents) for x in (query, key, value))
        heads = operation.whole(q, k, v, cu_seqlens=documents, query_offset=query_offset)
        return heads.reshape(batch, length, *heads.shape[2:]).transpose(0, 1)

    def _gathered(
        self,
        operation: _Operation,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        assert self.group is not None

        def attend(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
            offset = number * query.shape[0]
            return self._whole(operation, query, key, value, documents, offset)

        return gathered_attention(query, key, value, self.group, attend)

    def _ring(
        self,
        operation: _Operation,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
    ) -> Tensor:
        assert self.group is not None

        def maps(*parts: Tensor) -> QKV:
            return operation.maps(*(x.transpose(0, 1) for x in parts))

        ring = Ring(self.group, maps, None, operation.backend, documents)
        heads = ring_attention(query, key, value, operation.lambda_, ring)
        return operation.finish(heads).transpose(0, 1)


def _rows(heads: Tensor, documents: Tensor | None) -> Tensor:
    """[s, b, heads, d] as [b, s, heads, d], or with documents as one row [1, b s, heads, d]."""
    rows = heads.transpose(0, 1)
    return rows if documents is None else rows.flatten(0, 1)[None]


def row_boundaries(documents: Tensor, rows: int) -> list[Tensor]:
    """The ends of documents of each row on its own, from those of the rows laid end to end.

    Args:
        documents: [documents + 1] integers from 0 to rows x length; each row ends one.
        rows: how many rows there are.

    Returns:
        One tensor of integers from 0 to length per row.
    """
    length = int(documents[-1]) // rows
    return [
        documents[(documents >= row * length) & (documents <= (row + 1) * length)] - row * length
        for row in range(rows)
    ]
