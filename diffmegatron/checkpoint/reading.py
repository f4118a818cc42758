"""One safetensors file, as :mod:`~diffmegatron.checkpoint.writing` writes it, read and checked.

The header is checked when the file is opened: vectors of float32, then vectors of bytes, one after
the other to the end of the file. The content is checked when that is asked for, in one pass for
the checksum and for numbers that are not finite.

Why not ``safetensors.safe_open``: it does not say where in the file a tensor stands, so that the
two checks would each read all of it.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.errors import UserError
from diffmegatron.files import MAX_BYTES, parse_json, reason, shown

_DTYPES: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "U8": np.dtype("u1")}
_LENGTH_BYTES = 8
_BUFFER = 1 << 22
# How a pickle of protocol 2 to 5 begins, and a zip archive, which is what torch.save writes.
# A safetensors file begins with the length of its header, which neither can be.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")

_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class StoredTensor:
    """A vector as the header describes it; offsets in bytes from the end of the header."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    dtype: Literal["F32", "U8"]
    shape: tuple[_Count]
    data_offsets: tuple[_Count, _Count]


class _Header(BaseModel):
    """A file's header: every key but one is a tensor's name."""

    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, StoredTensor]

    metadata: dict[str, str] = Field(default={}, alias="__metadata__")

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return self.__pydantic_extra__


class TensorFile:
    """An opened file.

    Attributes:
        path: of the file.
        metadata: strings that the header holds beside the tensors.
        tensors: descriptions by name.

    Raises:
        UserError: the file cannot be read, or is not of the format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            header, size = self._read_header()
            self._content = np.memmap(path, mode="r", dtype=np.uint8)
        except OSError as error:
            raise UserError(f"cannot read {shown(path)}: {reason(error)}") from None
        self._begin = _LENGTH_BYTES + len(header)
        parsed: _Header = parse_json(header, _Header, shown(path))
        self.metadata = parsed.metadata
        self.tensors = parsed.tensors
        self._float_bytes = self._check_order(size - self._begin)

    def array(self, name: str) -> np.ndarray:
        """A tensor's values [n], float32 or uint8, in the mapped file: not to be written."""
        tensor = self.tensors[name]
        first, last = (self._begin + offset for offset in tensor.data_offsets)
        return self._content[first:last].view(_DTYPES[tensor.dtype])

    def check_content(self, entry: FileEntry) -> None:
        """Read every byte once.

        Raises:
            UserError: the checksum is not the entry's, a number is not finite, or it cannot be
                read.
        """
        try:
            checksum, finite = self._scan()
        except OSError as error:
            raise UserError(f"cannot read {shown(self.path)}: {reason(error)}") from None
        if checksum != entry.crc32:
            raise UserError(f"{shown(self.path)} is damaged: its checksum is not the manifest's")
        if not finite:
            raise UserError(
                f"{shown(self.path)} holds numbers that are not finite; no training goes on from it"
            )

    def _scan(self) -> tuple[int, bool]:
        with self.path.open("rb") as stream:
            checksum = zlib.crc32(stream.read(self._begin))
            floats, finite = self._float_bytes, True
            while block := stream.read(_BUFFER):
                checksum = zlib.crc32(block, checksum)
                numbers = np.frombuffer(block[:floats], _DTYPES["F32"])
                finite = finite and bool(np.isfinite(numbers).all())
                floats -= numbers.nbytes
        return checksum, finite

    def _read_header(self) -> tuple[bytes, int]:
        """The header's JSON, and the size of the file."""
        size = self.path.stat().st_size
        with self.path.open("rb") as stream:
            beginning = stream.read(_LENGTH_BYTES)
            if beginning[:2] in _PICKLES:
                raise UserError(
                    f"{shown(self.path)} is a pickle, which can run any program when it is read; "
                    "checkpoints consist of safetensors and JSON only"
                )
            length = int.from_bytes(beginning, "little")
            if length > min(size - _LENGTH_BYTES, MAX_BYTES):
                raise self._unreadable("its header is cut short")
            return stream.read(length), size

    def _check_order(self, content_bytes: int) -> int:
        """Refuse gaps and overlaps; returns how many bytes of float32 the content begins with."""
        end = float_bytes = 0
        ordered = sorted(self.tensors.values(), key=lambda each: (each.dtype, each.data_offsets))
        for tensor in ordered:
            begin, end = end, end + tensor.shape[0] * _DTYPES[tensor.dtype].itemsize
            if tensor.data_offsets != (begin, end):
                raise self._unreadable("its tensors do not follow each other")
            if tensor.dtype == "F32":
                float_bytes = end
        if end != content_bytes:
            raise self._unreadable(f"it has {content_bytes} bytes of tensors in place of {end}")
        return float_bytes

    def _unreadable(self, problem: str) -> UserError:
        return UserError(f"{shown(self.path)} is not a readable checkpoint file: {problem}")
