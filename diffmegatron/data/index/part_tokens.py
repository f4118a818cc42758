"""Tokens of a corpus that consists of several files, read like one array."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, open_file

# Each mapping keeps a file open, and the usual limit is 1024 open files per process.
_MAPPED_AT_ONCE = 128


class Tokens(Protocol):
    """Array of token ids that supports slices, such as a numpy array or :class:`PartTokens`."""

    @property
    def itemsize(self) -> int:
        """Number of bytes of a token id."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> np.ndarray: ...


class PartTokens:
    """Concatenation of files of token ids; a file is memory-mapped when it is first read.

    ``files`` has the path and the size in bytes of each file. A slice within one file is a view. A
    slice over several files is a copy, which is rare: a document never spans two files.
    """

    def __init__(self, files: Sequence[tuple[Path, int]], dtype: np.dtype) -> None:
        self.dtype = dtype
        filled = [(path, size // dtype.itemsize) for path, size in files if size]
        self._starts = list(itertools.accumulate((length for _, length in filled), initial=0))
        # As a decorator of a method, lru_cache would keep this object and its mapped files alive.
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(lambda number: _map(*filled[number], dtype))

    @property
    def itemsize(self) -> int:
        """Number of bytes of a token id."""
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
            raise UserError(f"cannot map {format_path(path)}: {error}; copy it again") from None
