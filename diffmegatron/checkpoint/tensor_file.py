"""Reader and writer of one safetensors file: 1-D float32 tensors, then 1-D uint8 tensors.

The safetensors library is not used, because its ``save_file`` holds Python's global interpreter
lock. A background save would therefore stall training.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.errors import UserError
from diffmegatron.files import MAX_BYTES, explain_os_errors, format_path, parse_json
from diffmegatron.section import CountOrZero

_DTYPES: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_NAMES = {torch.float32: "F32", torch.uint8: "U8"}
_LENGTH_BYTES = 8
_BUFFER = 1 << 24
# First bytes of files that torch.save writes: a pickle (protocols 2 to 5) or a zip archive.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of a 1-D tensor; ``data_offsets`` are (begin, end) in bytes after the header."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["F32", "U8"]
    shape: tuple[CountOrZero]
    data_offsets: tuple[CountOrZero, CountOrZero]


class _Header(BaseModel):
    """The header of a file; every key except ``__metadata__`` is the name of a tensor."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, StoredTensor]

    metadata: dict[str, str] = Field(default={}, alias="__metadata__")


class TensorFile:
    """An opened file: ``tensors`` (name -> header entry) and ``metadata`` (name -> string)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_os_errors(f"cannot read {format_path(path)}"):
            header = self._read_header()
            self._content = np.memmap(path, mode="r", dtype=np.uint8)
        self._begin = _LENGTH_BYTES + len(header)
        parsed: _Header = parse_json(header, _Header, format_path(path))
        self.metadata, self.tensors = parsed.metadata, parsed.__pydantic_extra__
        self._float_bytes = self._check_order()

    def array(self, name: str) -> np.ndarray:
        """Return a tensor [n], float32 or uint8, as a read-only view of the memory-mapped file."""
        tensor = self.tensors[name]
        first, last = (self._begin + offset for offset in tensor.data_offsets)
        return self._content[first:last].view(_DTYPES[tensor.dtype])

    def check_content(self, entry: FileEntry) -> None:
        """Check the file's checksum against ``entry``, and that all float32 values are finite."""
        is_finite, float_bytes = True, self._float_bytes
        with (
            explain_os_errors(f"cannot read {format_path(self.path)}"),
            self.path.open("rb") as stream,
        ):
            checksum = zlib.crc32(stream.read(self._begin))
            while block := stream.read(_BUFFER):
                checksum = zlib.crc32(block, checksum)
                numbers = np.frombuffer(block[:float_bytes], _DTYPES["F32"])
                is_finite = is_finite and bool(np.isfinite(numbers).all())
                float_bytes -= numbers.nbytes
        if checksum != entry.crc32:
            raise UserError(
                f"{format_path(self.path)} is damaged: its checksum differs from the manifest's"
            )
        if not is_finite:
            raise UserError(
                f"{format_path(self.path)} holds numbers that are not finite; use an older "
                "checkpoint"
            )

    def _read_header(self) -> bytes:
        size = self.path.stat().st_size
        with self.path.open("rb") as stream:
            beginning = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(beginning, "little")
            if length > min(size - _LENGTH_BYTES, MAX_BYTES):
                # Look for a pickle only if the length is impossible, because a valid length can
                # begin with the same bytes: 640 is stored as 80 02 (hex).
                if beginning[:2] in _PICKLES:
                    raise UserError(
                        f"{format_path(self.path)} is a pickle, which can run any program when it "
                        "is read; checkpoints consist only of safetensors, JSON and YAML"
                    )
                raise self._unreadable("its header is truncated")
            return stream.read(length)

    def _check_order(self) -> int:
        """Check that tensors fill the file, float32 first; return the number of float32 bytes."""
        end = float_bytes = 0
        for tensor in sorted(
            self.tensors.values(), key=lambda each: (each.dtype, each.data_offsets)
        ):
            begin, end = end, end + tensor.shape[0] * _DTYPES[tensor.dtype].itemsize
            if tensor.data_offsets != (begin, end):
                raise self._unreadable("its tensors have gaps or overlaps")
            if tensor.dtype == "F32":
                float_bytes = end
        content_bytes = self._content.size - self._begin
        if end != content_bytes:
            raise self._unreadable(f"it has {content_bytes} bytes of tensors instead of {end}")
        return float_bytes

    def _unreadable(self, problem: str) -> UserError:
        return UserError(f"{format_path(self.path)} is not a readable checkpoint file: {problem}")


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write contiguous float32 or uint8 CPU tensors to the disk; return the manifest entry."""
    # float32 first, so that every float32 tensor starts at a multiple of four bytes.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    # A checksum of the bytes in memory also detects damage on the way to the disk.
    checksum, size, advised = 0, 0, 0
    with path.open("wb") as stream:
        for block in (memoryview(_header(ordered, metadata)), *_buffers(ordered)):
            checksum = zlib.crc32(block, checksum)
            stream.write(block)
            size += len(block)
            if size - advised >= _BUFFER:
                # Linux starts to write these bytes now, which leaves less work for fsync.
                os.posix_fadvise(stream.fileno(), advised, size - advised, os.POSIX_FADV_DONTNEED)
                advised = size
        stream.flush()
        os.fsync(stream.fileno())
    return FileEntry(path.name, size, checksum)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _buffers(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for tensor in tensors.values():
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)
        for begin in range(0, len(view), _BUFFER):
            yield view[begin : begin + _BUFFER]
