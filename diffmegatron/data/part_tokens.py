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
        self._files = [file for file in files if file[1]]
        lengths = (size // dtype.itemsize for _, size in self._files)
        self._starts = list(itertools.accumulate(lengths, initial=0))
        self._mapped = lru_cache(_MAPPED_AT_ONCE)(self._map)

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

    def _map(self, number: int) -> np.ndarray:
        path, size = self._files[number]
        with open_file(path) as stream:
            try:
                mapped = np.memmap(stream, self.dtype, "r", shape=(size // self.itemsize,))
            except (OSError, ValueError) as error:
                raise UserError(f"cannot map {shown(path)}: {error}; copy it again") from None
        return np.asarray(mapped)
