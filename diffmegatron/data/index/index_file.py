"""Index file ``.idx`` of Megatron's IndexedDataset, written and checked in constant memory.

The format is that of ``megatron/core/datasets/indexed_dataset.py`` (``_IndexWriter``):

- 9 bytes of magic, version 1 (u64), code of the token dtype (u8)
- number of sequences S (u64), number of document boundaries D (u64)
- tokens of each sequence: int32 ``[S]``
- byte offset of each sequence in ``.bin``: int64 ``[S]``
- document boundaries, the first sequence of each document followed by S: int64 ``[D]``

Megatron's own writer keeps all values in Python lists.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffmegatron.errors import UserError
from diffmegatron.files import create_file, format_path, open_file

_MAGIC = b"MMIDIDX\x00\x00"
_START = _MAGIC + struct.pack("<Q", 1)
_HEADER = struct.Struct("<9sQBQQ")
_TYPE_CODES: dict[np.dtype, int] = {np.dtype(np.int32): 4, np.dtype(np.uint16): 8}
_BUFFER = 1 << 20


@dataclass(frozen=True)
class IndexHeader:
    """Header of an index; ``boundaries`` is the number of documents plus one."""

    dtype: np.dtype
    sequences: int
    boundaries: int

    @property
    def documents(self) -> int:
        """Number of documents."""
        return self.boundaries - 1

    @property
    def file_size(self) -> int:
        """Size in bytes of an index file with this header."""
        return _HEADER.size + 12 * self.sequences + 8 * self.boundaries


def write_index(path: Path, lengths: np.ndarray, counts: np.ndarray, dtype: np.dtype) -> None:
    """Write and fsync an index for tokens of ``dtype`` (int32 or uint16).

    Args:
        lengths: int32 ``[sequences]``, number of tokens of each sequence.
        counts: int32 ``[documents]``, number of sequences of each document.
    """
    with create_file(path) as stream:
        header = (_MAGIC, 1, _TYPE_CODES[dtype], len(lengths), len(counts) + 1)
        stream.write(_HEADER.pack(*header))
        for part in _buffers(lengths):
            stream.write(part.astype(np.int32, copy=False).data)
        for starts in _sums_before(lengths):
            stream.write((starts * dtype.itemsize).data)
        for starts in _sums_before(counts):
            stream.write(starts.data)
        stream.write(np.int64(len(lengths)).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def merge_indexes(path: Path, indexes: Sequence[Path]) -> None:
    """Write and fsync one index for the concatenation of token files of one dtype."""
    headers = [read_header(index) for index in indexes]
    opened = [
        _mapped(index, header)
        for index, header in zip(indexes, headers, strict=True)
        if header.documents
    ]
    dtype, sequences = headers[0].dtype, sum(header.sequences for header in headers)
    documents = sum(header.documents for header in headers)
    with create_file(path) as stream:
        stream.write(_HEADER.pack(_MAGIC, 1, _TYPE_CODES[dtype], sequences, documents + 1))
        for lengths, _, _ in opened:
            for part in _buffers(lengths):
                stream.write(part.data)
        before = 0
        for lengths, pointers, _ in opened:
            for part in _buffers(pointers):
                stream.write((part + before).data)
            before += int(pointers[-1]) + int(lengths[-1]) * dtype.itemsize
        before = 0
        for lengths, _, boundaries in opened:
            for part in _buffers(boundaries[:-1]):
                stream.write((part + before).data)
            before += len(lengths)
        stream.write(np.int64(sequences).tobytes())
        stream.flush()
        os.fsync(stream.fileno())


def _mapped(path: Path, header: IndexHeader) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory-map an index; return its lengths, byte offsets and document boundaries."""
    place, arrays = _HEADER.size, []
    for dtype, count in (
        (np.int32, header.sequences),
        (np.int64, header.sequences),
        (np.int64, header.boundaries),
    ):
        arrays.append(np.asarray(np.memmap(path, dtype, mode="r", offset=place, shape=(count,))))
        place += arrays[-1].nbytes
    lengths, pointers, boundaries = arrays
    return lengths, pointers, boundaries


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
    header = IndexHeader(types[code], sequences, boundaries)
    if not (1 <= header.documents <= sequences or header.documents == sequences == 0):
        raise UserError(
            f"index {format_path(path)} has {sequences} sequences for {header.documents} "
            "documents; copy or prepare it again"
        )
    if size != header.file_size:
        raise UserError(
            f"index {format_path(path)} has {size} bytes, but {sequences} sequences need "
            f"{header.file_size}; copy or prepare it again"
        )
    if end != sequences:
        raise UserError(
            f"index {format_path(path)} is damaged: its documents end with sequence {end} of "
            f"{sequences}; copy or prepare it again"
        )
    return header


def check_boundaries(path: str | Path, boundaries: np.ndarray) -> None:
    """Refuse document boundaries, int64 ``[documents + 1]``, unless they increase from 0."""
    if boundaries[0] != 0:
        raise _damaged_boundary(path, boundaries, 0)
    for start in range(0, len(boundaries), _BUFFER):
        part = boundaries[start : start + _BUFFER + 1]
        empty = np.flatnonzero(part[1:] <= part[:-1])
        if len(empty):
            raise _damaged_boundary(path, boundaries, start + int(empty[0]) + 1)


def _damaged_boundary(path: str | Path, boundaries: np.ndarray, place: int) -> UserError:
    return UserError(
        f"index {format_path(Path(path))} is damaged at boundary {place} of its documents: "
        f"sequence {boundaries[place]}; copy or prepare it again"
    )


def _buffers(array: np.ndarray) -> Iterator[np.ndarray]:
    return (array[start : start + _BUFFER] for start in range(0, len(array), _BUFFER))


def _sums_before(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield, in pieces, the exclusive cumulative sum of an array as int64."""
    total = 0
    for part in _buffers(array):
        ends = total + np.cumsum(part, dtype=np.int64)
        yield ends - part
        total = int(ends[-1])
