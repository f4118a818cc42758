"""Reader of one safetensors file that ``writing.py`` wrote: 1-D float32 tensors, then 1-D uint8.

``safetensors.safe_open`` does not return the positions of tensors in the file. They allow one pass
over the file for both the checksum and the check that all float32 values are finite.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from diffmegatron.checkpoint.checkpoint_manifest import CountOrZero, FileEntry
from diffmegatron.errors import UserError
from diffmegatron.files import MAX_BYTES, format_path, os_error_text, parse_json

_DTYPES: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_LENGTH_BYTES = 8
_BUFFER = 1 << 22
# First bytes of a pickle (protocols 2 to 5), and of a zip archive, which torch.save writes.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")


@dataclass(frozen=True)
class StoredTensor:
    """Header entry of a one-dimensional tensor; offsets are bytes after the header's end."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["F32", "U8"]
    shape: tuple[CountOrZero]
    data_offsets: tuple[CountOrZero, CountOrZero]


class _Header(BaseModel):
    """The header of a file; every key except ``__metadata__`` is the name of a tensor."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, StoredTensor]

    metadata: dict[str, str] = Field(default={}, alias="__metadata__")

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.__pydantic_extra__


class TensorFile:
    """An opened safetensors file whose header has been checked.

    Attributes:
        metadata: strings of the header's ``__metadata__``.
        tensors: header entry of each tensor by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header, size = self._read_header()
            self._content = np.memmap(path, mode="r", dtype=np.uint8)
        except OSError as error:
            raise UserError(f"cannot read {format_path(path)}: {os_error_text(error)}") from None
        self._begin = _LENGTH_BYTES + len(header)
        parsed: _Header = parse_json(header, _Header, format_path(path))
        self.metadata = parsed.metadata
        self.tensors = parsed.tensors
        self._float_bytes = self._check_order(size - self._begin)

    def array(self, name: str) -> np.ndarray:
        """Return a tensor [n], float32 or uint8, as a read-only view of the memory-mapped file."""
        tensor = self.tensors[name]
        first, last = (self._begin + offset for offset in tensor.data_offsets)
        return self._content[first:last].view(_DTYPES[tensor.dtype])

    def check_content(self, entry: FileEntry) -> None:
        """Read the whole file; check its checksum and that all float32 values are finite."""
        try:
            checksum, is_finite = self._scan()
        except OSError as error:
            raise UserError(
                f"cannot read {format_path(self.path)}: {os_error_text(error)}"
            ) from None
        if checksum != entry.crc32:
            raise UserError(
                f"{format_path(self.path)} is damaged: its checksum differs from the manifest's"
            )
        if not is_finite:
            raise UserError(
                f"{format_path(self.path)} holds numbers that are not finite; use an older "
                "checkpoint"
            )

    def _scan(self) -> tuple[int, bool]:
        with self.path.open("rb") as stream:
            checksum = zlib.crc32(stream.read(self._begin))
            float_bytes, is_finite = self._float_bytes, True
            while block := stream.read(_BUFFER):
                checksum = zlib.crc32(block, checksum)
                numbers = np.frombuffer(block[:float_bytes], _DTYPES["F32"])
                is_finite = is_finite and bool(np.isfinite(numbers).all())
                float_bytes -= numbers.nbytes
        return checksum, is_finite

    def _read_header(self) -> tuple[bytes, int]:
        """Return the JSON of the header, and the size of the file in bytes."""
        size = self.path.stat().st_size
        with self.path.open("rb") as stream:
            beginning = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(beginning, "little")
            if length > min(size - _LENGTH_BYTES, MAX_BYTES):
                # Possible lengths can begin like a pickle: 640 is stored as 80 02 (hex).
                if beginning[:2] in _PICKLES:
                    raise UserError(
                        f"{format_path(self.path)} is a pickle, which can run any program when it "
                        "is read; checkpoints consist only of safetensors, JSON and YAML"
                    )
                raise self._unreadable("its header is truncated")
            return stream.read(length), size

    def _check_order(self, content_bytes: int) -> int:
        """Check that float32 tensors, then uint8 tensors fill the file without gap or overlap.

        Return the total size of the float32 tensors in bytes.
        """
        end = float_bytes = 0
        ordered = sorted(self.tensors.values(), key=lambda each: (each.dtype, each.data_offsets))
        for tensor in ordered:
            begin, end = end, end + tensor.shape[0] * _DTYPES[tensor.dtype].itemsize
            if tensor.data_offsets != (begin, end):
                raise self._unreadable("its tensors have gaps or overlaps")
            if tensor.dtype == "F32":
                float_bytes = end
        if end != content_bytes:
            raise self._unreadable(f"it has {content_bytes} bytes of tensors instead of {end}")
        return float_bytes

    def _unreadable(self, problem: str) -> UserError:
        return UserError(f"{format_path(self.path)} is not a readable checkpoint file: {problem}")
