"""Best-fit packing of documents into sequences with few cuts (Ding et al., ICML 2024).

A document longer than a sequence is cut into whole sequences and a rest. Every piece, longest
first, is put into the sequence with the least remaining space that can hold it.
"""

import numpy as np

# Number of documents packed at a time, which bounds memory and hardly changes the fill.
_DOCUMENTS_AT_A_TIME = 1 << 22


def pack(
    documents: np.ndarray, lengths: np.ndarray, capacity: int, *, combine: bool
) -> dict[str, np.ndarray]:
    """Assign every token of the documents to exactly one sequence.

    Args:
        documents: int64 ``[n]``, document numbers.
        lengths: int ``[n]``, tokens of each document.
        capacity: tokens per sequence.
        combine: whether to combine pieces by best fit; otherwise each piece has its own sequence.

    Returns:
        ``documents`` int64 ``[p]``, ``starts`` and ``lengths`` int32 ``[p]`` of the pieces in the
        order of their sequences, and ``ends`` int64 ``[sequences]``, the number of pieces up to the
        end of each sequence.
    """
    parts = []
    sequences = 0
    for first in range(0, len(documents), _DOCUMENTS_AT_A_TIME):
        chosen = slice(first, first + _DOCUMENTS_AT_A_TIME)
        owners, starts, sizes = _cut(lengths[chosen], capacity)
        places = best_fit(sizes, capacity) if combine else np.arange(len(sizes))
        order = np.argsort(places, kind="stable")
        counts = np.bincount(places)
        parts.append((documents[chosen][owners[order]], starts[order], sizes[order], counts))
        sequences += len(counts)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return {
        "documents": columns[0],
        "starts": columns[1].astype(np.int32),
        "lengths": columns[2].astype(np.int32),
        "ends": np.cumsum(columns[3], dtype=np.int64),
    }


def _cut(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return document index, start and length of pieces of at most ``capacity`` tokens."""
    lengths = lengths.astype(np.int64)
    counts = -(-lengths // capacity)
    owners = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    starts = (np.arange(len(owners)) - first_piece[owners]) * capacity
    return owners, starts, np.minimum(capacity, lengths[owners] - starts)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each piece by best-fit decreasing, int64 ``[n]``, numbered from 0.

    Pieces of one size are placed together: all bins with the least sufficient space receive as many
    as they can hold. The number of steps depends on the distinct sizes, not on the number of
    pieces.

    Args:
        sizes: int ``[n]``, 1 to ``capacity``.
        capacity: size of a bin.
    """
    places = np.empty(len(sizes), dtype=np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    bounds = np.flatnonzero(np.diff(sizes[by_size])) + 1
    open_bins = _OpenBins(capacity)
    for pieces in np.split(by_size, bounds) if len(sizes) else []:
        size = int(sizes[pieces[0]])
        while len(pieces):
            space, bins = open_bins.take(size, len(pieces))
            per_bin = space // size
            placed = min(len(pieces), per_bin * len(bins))
            places[pieces[:placed]] = np.repeat(bins, per_bin)[:placed]
            pieces = pieces[placed:]
            full, rest = divmod(placed, per_bin)
            open_bins.put(space - per_bin * size, bins[:full])
            if rest:
                open_bins.put(space - rest * size, bins[full:])
    return places


class _OpenBins:
    """Open bins, grouped by their remaining space."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._bins: dict[int, list[np.ndarray]] = {}
        self._open = 0  # Bit r is set if a bin with space r is open.
        self._count = 0

    def take(self, size: int, pieces: int) -> tuple[int, np.ndarray]:
        """Remove open bins for pieces of this size, or create bins if none has enough space.

        All returned bins have the least sufficient space, and at most as many are returned as the
        pieces can fill. Bins of equal space are a stack.

        Returns:
            The space of each bin, and the numbers of the bins, int64 ``[bins]``.
        """
        sufficient = self._open >> size
        if not sufficient:
            number = -(-pieces // (self._capacity // size))
            self._count += number
            return self._capacity, np.arange(self._count - number, self._count)
        space = size + (sufficient & -sufficient).bit_length() - 1
        stack = self._bins[space]
        bins = stack.pop()
        wanted = -(-pieces // (space // size))
        if len(bins) > wanted:
            stack.append(bins[wanted:])
        if not stack:
            self._open &= ~(1 << space)
        return space, bins[:wanted]

    def put(self, space: int, bins: np.ndarray) -> None:
        """Add bins that have this space left."""
        if space and len(bins):
            self._bins.setdefault(space, []).append(bins)
            self._open |= 1 << space
