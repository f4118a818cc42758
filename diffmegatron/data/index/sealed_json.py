"""JSON files that contain a checksum of their content, for state that users never edit.

Such a file describes other data files, for example how many documents they contain. If a damaged
disk changes a number in the file, it is still valid JSON. A program that trusted the wrong number
would skip or repeat documents unnoticed. The checksum reveals the change.
"""

import hashlib
from pathlib import Path
from typing import Any

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, parse_json, read_bytes, write_durably


def write_sealed(path: Path, content: str) -> None:
    """Write JSON and, on the next line, its sha256; the file is replaced atomically.

    Args:
        path: file to write.
        content: JSON on one line.

    Raises:
        OSError: the file cannot be written.
    """
    line = content.encode()
    write_durably(path, line + b"\n" + _seal(line) + b"\n")


def read_sealed(path: Path, schema: Any) -> Any:
    """Read a file written by :func:`write_sealed`, and check its checksum.

    Args:
        path: file to read.
        schema: type against which pydantic checks the content.

    Raises:
        UserError: the file is missing, was changed, or does not fit the schema.
    """
    line, _, seal = read_bytes(path).removesuffix(b"\n").rpartition(b"\n")
    if seal != _seal(line):
        raise UserError(f"{format_path(path)} is damaged and cannot be used: its checksum differs")
    return parse_json(line, schema, format_path(path))


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
