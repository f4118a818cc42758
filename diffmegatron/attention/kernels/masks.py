"""The keys that each query row may attend to: causality, windows, offsets, document boundaries."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral
from typing import TypeVar

import torch
from torch import Tensor

from .checks import check_tensors, shape_of

# Largest absolute value of an offset, so that its sum with a length fits the kernels' int32.
LARGEST_POSITION = 2**30

T = TypeVar("T")


def cached_tensors(create: Callable[..., T]) -> Callable[..., T]:
    """Cache the eight most recently used results of a function that creates tensors.

    Without the cache, every layer would copy the same tensors to the GPU and wait. `create` runs
    outside inference_mode, because autograd cannot save inference tensors.
    """
    return lru_cache(maxsize=8)(torch.inference_mode(False)(create))


@dataclass(frozen=True)
class AttentionMask:
    """Visible (query, key) pairs of one attention call, defined by global positions.

    A global position is a position in the unsharded sequence. Query row i has the position
    `query_offset + i`, and key j has the position `key_offset + j`. A pair is visible if both
    positions belong to the same document and, with `causal`, the key's position is not later. With
    a `window`, which only a causal mask has, a query also sees only itself and the `window - 1`
    positions before it. `cu_seqlens` has the document boundaries
    `(0, end_of_first, ..., end_of_last)` in global positions; None means one document.
    """

    query_length: int
    key_length: int
    causal: bool = True
    query_offset: int = 0
    key_offset: int = 0
    cu_seqlens: tuple[int, ...] | None = None
    window: int | None = None

    @property
    def features(self) -> frozenset[str]:
        """Keys of `registry.FEATURES` that a backend must support for this mask.

        With `cu_seqlens` they are "documents" and, unless queries and keys cover all documents,
        "offsets". Without `cu_seqlens`, a causal mask needs "offsets" if the last query and the
        last key have different positions. A window adds "windows".
        """
        windows = frozenset({"windows"} if self.window is not None else ())
        if self.cu_seqlens is not None:
            covered = range(self.cu_seqlens[-1])
            queries = range(self.query_offset, self.query_offset + self.query_length)
            keys = range(self.key_offset, self.key_offset + self.key_length)
            is_whole = queries == keys == covered
            return windows | ({"documents"} if is_whole else {"documents", "offsets"})
        aligned_at_end = self.key_offset + self.key_length - self.query_length
        is_offset = self.causal and self.query_offset != aligned_at_end
        return windows | ({"offsets"} if is_offset else set())

    @property
    def is_plain(self) -> bool:
        """True if torch's attention needs only its argument `is_causal` for this mask.

        It is False with documents or a window. For a causal mask without them, it is True only if
        queries and keys have the same positions.
        """
        is_square = (self.query_offset, self.query_length) == (self.key_offset, self.key_length)
        is_limited = self.cu_seqlens is not None or self.window is not None
        return not is_limited and (is_square or not self.causal)

    def key_range(self, row_start: int, row_stop: int) -> tuple[int, int]:
        """Return an interval [start, stop) that contains all keys visible to the rows.

        Rows [row_start, row_stop) and keys are indices within this call, without the offsets. An
        empty interval has start == stop.
        """
        first, last = self.query_offset + row_start, self.query_offset + row_stop - 1
        start, stop = 0, self.key_length
        if self.causal:
            stop = min(stop, last + 1 - self.key_offset)
        if self.window is not None:
            start = max(start, first + 1 - self.window - self.key_offset)
        if self.cu_seqlens is not None:
            bounds = self.cu_seqlens
            start = max(start, bounds[bisect_right(bounds, first) - 1] - self.key_offset)
            stop = min(stop, bounds[bisect_right(bounds, last)] - self.key_offset)
        return (start, stop) if start < stop else (0, 0)

    def unmasked_prefix(self, row_start: int, row_stop: int) -> int:
        """Return the number of leading keys of `key_range` that every one of the rows sees.

        It is 0 if the rows belong to several documents, or a window hides the first of these keys.
        """
        start, stop = self.key_range(row_start, row_stop)
        first, last = self.query_offset + row_start, self.query_offset + row_stop - 1
        if self.window is not None and last - self.window >= self.key_offset + start:
            return 0
        bounds = self.cu_seqlens
        if bounds is not None and bisect_right(bounds, first) != bisect_right(bounds, last):
            return 0
        if not self.causal:
            return stop - start
        diagonal = self.query_offset + row_start + 1 - self.key_offset
        return min(max(diagonal - start, 0), stop - start)

    def hidden(
        self, rows: tuple[int, int], keys: tuple[int, int], device: torch.device
    ) -> Tensor | None:
        """Return a boolean mask `[number of rows, number of keys]`, True for hidden pairs.

        `rows` and `keys` are intervals (start, stop) of indices within this call, without the
        offsets. The result is None if the attention is neither causal nor limited to documents.
        """
        if not self.causal and self.cu_seqlens is None:
            return None
        query = torch.arange(*rows, device=device)[:, None] + self.query_offset
        key = torch.arange(*keys, device=device)[None, :] + self.key_offset
        hidden = key > query if self.causal else torch.zeros_like(key > query)
        if self.window is not None:
            hidden = hidden | (key <= query - self.window)
        if self.cu_seqlens is not None:
            bounds = torch.tensor(self.cu_seqlens, device=device)
            query_document = torch.searchsorted(bounds, query.flatten(), right=True)
            key_document = torch.searchsorted(bounds, key.flatten(), right=True)
            hidden = hidden | (query_document[:, None] != key_document[None, :])
        return hidden

    @cached_tensors
    def key_intervals(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return start and stop of each row's visible keys: two int32 tensors `[query_length]`."""
        position = torch.arange(self.query_length) + self.query_offset
        start, stop = self.document_bounds(position)
        if self.causal:
            stop = stop.minimum(position + 1)
        if self.window is not None:
            start = start.maximum(position + 1 - self.window)
        return _clamped(start - self.key_offset, stop - self.key_offset, self.key_length, device)

    @cached_tensors
    def query_intervals(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return start and stop of the rows that see each key: two int32 tensors `[key_length]`."""
        position = torch.arange(self.key_length) + self.key_offset
        start, stop = self.document_bounds(position)
        if self.causal:
            start = start.maximum(position)
        if self.window is not None:
            stop = stop.minimum(position + self.window)
        offset = self.query_offset
        return _clamped(start - offset, stop - offset, self.query_length, device)

    def document_bounds(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return start and end of the document at each position; +-(2^31 - 1) without documents."""
        if self.cu_seqlens is None:
            infinite = torch.full_like(position, torch.iinfo(torch.int32).max)
            return -infinite, infinite
        bounds = torch.tensor(self.cu_seqlens)
        document = torch.searchsorted(bounds, position, right=True)
        return bounds[document - 1], bounds[document]


def build_mask(
    query_length: int,
    key_length: int,
    *,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
    window: int | None = None,
) -> AttentionMask:
    """Return the mask of an attention call, after checking its arguments.

    With `query_offset=None` the last query has the position of the last key. A window that hides no
    key gives the same mask as no window, so that the same kernels run.
    """
    for name, position in (("query_offset", query_offset or 0), ("key_offset", key_offset)):
        if not isinstance(position, Integral) or abs(position) > LARGEST_POSITION:
            raise ValueError(
                f"{name} is {position!r}; it must be an integer of at most {LARGEST_POSITION}"
            )
    if query_offset is None:
        query_offset = key_offset + key_length - query_length
    if window is not None:
        _check_window(window, causal)
    bounds = None
    if cu_seqlens is not None:
        check_tensors(cu_seqlens=cu_seqlens)
        bounds = _document_bounds(cu_seqlens)
        for name, offset, length in (
            ("query", query_offset, query_length),
            ("key", key_offset, key_length),
        ):
            if offset < 0 or offset + length > bounds[-1]:
                raise ValueError(
                    f"{name}_offset={offset} with {length} positions lies outside of cu_seqlens, "
                    f"which covers 0 to {bounds[-1]}"
                )
    if window is not None:
        reach = query_offset + query_length - key_offset
        if bounds is not None:
            reach = min(reach, longest_sequence(bounds))
        window = None if window >= reach else int(window)
    return AttentionMask(query_length, key_length, causal, query_offset, key_offset, bounds, window)


@cached_tensors
def sequence_bounds(row: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    """Return the boundaries of the sequences of all batch rows, concatenated row by row, int32.

    `row` has the boundaries `(0, end_of_first, ...)` of the sequences of one batch row.
    """
    bounds = torch.tensor(row, dtype=torch.int32)
    starts = torch.arange(batch, dtype=torch.int32)[:, None] * bounds[-1]
    return torch.cat([bounds[:1], (starts + bounds[1:]).flatten()]).to(device)


def longest_sequence(row: tuple[int, ...]) -> int:
    """Return the length of the longest sequence of `sequence_bounds`."""
    return max(stop - start for start, stop in pairwise(row))


def _check_window(window: int, causal: bool) -> None:
    if not isinstance(window, Integral) or isinstance(window, bool) or window < 1:
        raise ValueError(f"window is {window!r}; it must be an integer of 1 or more, or None")
    if not causal:
        raise ValueError(f"window is {window} with causal=False; a window needs causal=True")


def _document_bounds(cu_seqlens: Tensor) -> tuple[int, ...]:
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens has shape {shape_of(cu_seqlens)} and dtype {cu_seqlens.dtype}; "
            "it must be a 1-dim integer tensor [0, end of first document, ...]"
        )
    bounds = tuple(int(bound) for bound in cu_seqlens.tolist())
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        shown = list(bounds[:8])
        raise ValueError(
            f"cu_seqlens of shape {shape_of(cu_seqlens)} starts {shown}; "
            "it must start at 0 and increase strictly"
        )
    return bounds


def _clamped(
    start: Tensor, stop: Tensor, length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return [start, stop) limited to [0, length); empty intervals have start == stop."""
    start = start.clamp(0, length)
    stop = stop.clamp(0, length).maximum(start)
    return start.to(device, torch.int32), stop.to(device, torch.int32)
