"""Writer of one safetensors file (https://github.com/huggingface/safetensors#format).

``safetensors.torch.save_file`` holds Python's global interpreter lock while it writes, which would
stall training during a background save. Its file would have to be read again for the checksum.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_manifest import FileEntry

_NAMES = {torch.float32: "F32", torch.uint8: "U8"}
_BUFFER = 1 << 24


def write_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> FileEntry:
    """Write contiguous float32 or uint8 CPU tensors to the disk; return the file's manifest entry.

    The checksum is that of the bytes in memory, so later checks detect damage on the way to the
    disk.
    """
    # float32 first, so that every float32 tensor starts at a multiple of four bytes.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    checksum, size, advised = 0, 0, 0
    with path.open("wb") as stream:
        for block in (memoryview(_header(ordered, metadata)), *_buffers(ordered)):
            checksum = zlib.crc32(block, checksum)
            stream.write(block)
            size += len(block)
            if size - advised >= _BUFFER:
                # Linux then writes the pages while the next checksum is computed. Without this
                # call, fsync would write all pages at the end.
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
