"""The tokens of a corpus that was prepared in parts, read as if they were one array."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from diffmegatron.errors import UserError
from diffmegatron.files import open_file, shown

# Each keeps a file open, of which a process may often have 1024 only.
_MAPPED_AT_ONCE = 128


class Tokens(Protocol):
    """Token ids, of which slices are read: an array, or what reads like one."""

    @property
    def itemsize(self) -> int:
        """Bytes of an id."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> np.ndarray: ...


class PartTokens:
    """Files of token ids, one after the other; mapped when they are read, nothing is copied.

    (A slice over the seam of two is; no document lies there.)

    Args:
        files: each with its size in bytes.
        dtype: of an id.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: np.dtype) -> None:
        self.dtype = dtype
        filled = [(path, size // dtype.itemsize) for path, size in files if size]
        self._starts = list(itertools.accumulate((length for _, length in filled), initial=0))
        # Not a method, which would keep this alive.
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(lambda number: _map(*filled[number], dtype))

    @property
    def itemsize(self) -> int:
        """Bytes of an id."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, place: slice, /) -> np.ndarray:
        first, end, _ = place.indices(len(self))
        number = bisect_right(self._starts, first) - 1
        found = []
        while first < end:
            start, stop = self._starts[number], min(end, self._starts[number + 1])
            found.append(self._mapped(number)[first - start : stop - start])
            first, number = stop, number + 1
        return found[0] if len(found) == 1 else np.concatenate([np.empty(0, self.dtype), *found])


def _map(path: Path, length: int, dtype: np.dtype) -> np.ndarray:
    with open_file(path) as stream:
        try:
            return np.asarray(np.memmap(stream, dtype, "r", shape=(length,)))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot map {shown(path)}: {error}; copy it again") from None
