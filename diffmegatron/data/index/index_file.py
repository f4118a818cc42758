"""Index file ``.idx`` of Megatron's IndexedDataset, written and checked in constant memory.

The format is that of ``megatron/core/datasets/indexed_dataset.py`` (``_IndexWriter``):

- 9 bytes of magic, version 1 (u64), code of the token dtype (u8)
- number of sequences S (u64), number of document boundaries D = documents + 1 (u64)
- number of tokens of each sequence: int32 ``[S]``
- byte offset of each sequence in ``.bin``: int64 ``[S]``
- document boundaries (number of the first sequence of each document, then S): int64 ``[D]``
"""

import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diffmegatron.errors import UserError
from diffmegatron.files import create_file, format_path, open_file

_MAGIC = b"MMIDIDX\x00\x00"
_START = _MAGIC + struct.pack("<Q", 1)
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_CODES: dict[np.dtype, int] = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}
_BUFFER = 1 << 20


class IndexHeader(NamedTuple):
    """Header of an index for tokens of ``dtype`` (int32 or uint16)."""

    dtype: np.dtype
    sequences: int
    documents: int


def write_index(path: Path, lengths: np.ndarray, counts: np.ndarray, dtype: np.dtype) -> None:
    """Write and fsync an index for tokens of ``dtype`` (int32 or uint16).

    ``lengths``, int32 ``[sequences]``, is the number of tokens of each sequence. ``counts``, int32
    ``[documents]``, is the number of sequences of each document.
    """
    header = IndexHeader(dtype, len(lengths), len(counts))
    _write(path, header, [lengths], _sums_before(_buffers(counts)))


def merge_indexes(path: Path, indexes: Sequence[Path]) -> None:
    """Write and fsync one index for the concatenated token files of ``indexes``.

    All token files must have the same dtype.
    """
    headers = [read_header(index) for index in indexes]
    filled = [pair for pair in zip(indexes, headers, strict=True) if pair[1].documents]
    sequences = sum(header.sequences for header in headers)
    documents = sum(header.documents for header in headers)
    lengths = [_mapped(index, np.int32, 0, header.sequences) for index, header in filled]
    starts = itertools.accumulate(map(len, lengths), initial=0)
    boundaries = (
        part + start
        for (index, header), start in zip(filled, starts, strict=False)
        for part in _buffers(_mapped(index, np.int64, 12 * header.sequences, header.documents))
    )
    _write(path, IndexHeader(headers[0].dtype, sequences, documents), lengths, boundaries)


def _write(
    path: Path,
    header: IndexHeader,
    lengths: Sequence[np.ndarray],
    boundaries: Iterable[np.ndarray],
) -> None:
    """Write an index from arrays of sequence lengths and of ``boundaries``.

    ``boundaries`` are int64 numbers of the first sequence of each document, without the last
    boundary of the file.
    """
    with create_file(path) as stream:
        code, sequences = _TYPE_CODES[header.dtype], header.sequences
        stream.write(_HEADER.pack(_MAGIC, 1, code, sequences, header.documents + 1))
        for part in _buffers(*lengths):
            stream.write(part.astype(np.int32, copy=False).data)
        for starts in _sums_before(_buffers(*lengths)):
            stream.write((starts * header.dtype.itemsize).data)
        for starts in boundaries:
            stream.write(starts.data)
        stream.write(np.int64(sequences).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def _mapped(path: Path, dtype: type, offset: int, count: int) -> np.ndarray:
    """Memory-map the array that begins ``offset`` bytes after the header of an index."""
    place = _HEADER.size + offset
    return np.asarray(np.memmap(path, dtype, mode="r", offset=place, shape=(count,)))


def read_header(path: Path) -> IndexHeader:
    """Read an index's header; check its counts, the file size and the last document boundary."""
    with open_file(path) as stream:
        content = stream.read(_HEADER.size)
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        end = int.from_bytes(stream.read(8), "little")
    types: dict[int, np.dtype] = {code: dtype for dtype, code in _TYPE_CODES.items()}
    if len(content) < _HEADER.size or not content.startswith(_START) or content[17] not in types:
        raise UserError(
            f"{format_path(path)} is not an index of Megatron (version 1, int32 or uint16 tokens)"
        )
    _, _, code, sequences, boundaries = _HEADER.unpack(content)
    documents = boundaries - 1
    if not (1 <= documents <= sequences or documents == sequences == 0):
        raise UserError(
            f"index {format_path(path)} has {sequences} sequences for {documents} "
            "documents; copy or prepare it again"
        )
    expected = _HEADER.size + 12 * sequences + 8 * boundaries
    if size != expected:
        raise UserError(
            f"index {format_path(path)} has {size} bytes, but {sequences} sequences need "
            f"{expected}; copy or prepare it again"
        )
    if end != sequences:
        raise UserError(
            f"index {format_path(path)} is damaged: its documents end with sequence {end} of "
            f"{sequences}; copy or prepare it again"
        )
    return IndexHeader(types[code], sequences, documents)


def check_boundaries(path: str | Path, boundaries: np.ndarray) -> None:
    """Check the document boundaries of an index, int64 ``[documents + 1]``.

    They must start at 0 and be strictly increasing.
    """
    wrong = (
        start + int(place) + 1
        for start in range(0, len(boundaries), _BUFFER)
        for part in [boundaries[start : start + _BUFFER + 1]]
        for place in np.flatnonzero(part[1:] <= part[:-1])
    )
    place = 0 if boundaries[0] != 0 else next(wrong, None)
    if place is not None:
        raise UserError(
            f"index {format_path(Path(path))} is damaged at boundary {place} of its documents: "
            f"sequence {boundaries[place]}; copy or prepare it again"
        )


def _buffers(*arrays: np.ndarray) -> Iterator[np.ndarray]:
    for array in arrays:
        yield from (array[start : start + _BUFFER] for start in range(0, len(array), _BUFFER))


def _sums_before(parts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield exclusive cumulative sums over all parts, int64: [1, 2], [3] -> [0, 1], [3]."""
    total = 0
    for part in parts:
        ends = total + np.cumsum(part, dtype=np.int64)
        yield ends - part
        total = int(ends[-1])
