"""Best-fit packing of documents into sequences with few cuts (Ding et al., ICML 2024).

A document that is longer than a sequence is cut into pieces as long as a sequence; the last piece
may be shorter. Any other document is one piece. In descending order of length, each piece is put
into the fullest sequence that has enough space, or into a new sequence.
"""

import numpy as np

# Packing in groups of this size bounds the memory.
_DOCUMENTS_AT_A_TIME = 1 << 22


def pack(
    documents: np.ndarray, lengths: np.ndarray, capacity: int, *, combine: bool
) -> dict[str, np.ndarray]:
    """Assign every token of the n documents to exactly one sequence of at most ``capacity`` tokens.

    If ``combine`` is False, each piece is a sequence of its own.

    Returns:
        Four arrays by name. Three describe the p pieces in the order of their sequences:
        ``documents`` int64 ``[p]``, ``starts`` int32 ``[p]`` (index of a piece's first token in
        its document) and ``lengths`` int32 ``[p]``. The array ``ends`` int64 ``[sequences]`` is the
        number of pieces up to the end of each sequence.
    """
    parts = []
    for first in range(0, max(1, len(documents)), _DOCUMENTS_AT_A_TIME):
        chosen = slice(first, first + _DOCUMENTS_AT_A_TIME)
        owners, starts, sizes = _cut(lengths[chosen], capacity)
        places = best_fit(sizes, capacity) if combine else np.arange(len(sizes))
        order = np.argsort(places, kind="stable")
        counts = np.bincount(places)
        parts.append((documents[chosen][owners[order]], starts[order], sizes[order], counts))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return {
        "documents": columns[0],
        "starts": columns[1].astype(np.int32),
        "lengths": columns[2].astype(np.int32),
        "ends": np.cumsum(columns[3], dtype=np.int64),
    }


def _cut(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into pieces of at most ``capacity`` tokens.

    Return the index of each piece's document, its first token in the document, and its length.
    """
    lengths = lengths.astype(np.int64)
    counts = -(-lengths // capacity)
    owners = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.cumsum(counts) - counts
    starts = (np.arange(len(owners)) - first_piece[owners]) * capacity
    return owners, starts, np.minimum(capacity, lengths[owners] - starts)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Assign n pieces to bins by best-fit decreasing; return each piece's bin, int64 ``[n]``.

    Pieces of equal size are placed together, because a loop over all pieces would be slow.
    ``capacity`` is the size of an empty bin.
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
    """Bins that still have free space, grouped by the amount of free space."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._bins: dict[int, list[np.ndarray]] = {}
        self._open = 0  # Bit r is set if there is a bin with free space r.
        self._count = 0

    def take(self, size: int, pieces: int) -> tuple[int, np.ndarray]:
        """Remove bins for ``pieces`` pieces of ``size``; return the bins' free space and numbers.

        The returned bins have equal free space, the least that is sufficient for a piece. They may
        be too few for all pieces. If no bin has enough space, bins for all pieces are created.
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
        if space and len(bins):
            self._bins.setdefault(space, []).append(bins)
            self._open |= 1 << space
