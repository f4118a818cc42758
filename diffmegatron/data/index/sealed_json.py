"""JSON files with a checksum of their content, for state that users never edit.

A flipped bit in a number may leave valid JSON. A wrong number of documents, for example, would skip
or repeat documents unnoticed.
"""

import hashlib
from pathlib import Path
from typing import Any

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, parse_json, read_bytes, write_durably


def write_sealed(path: Path, content: str) -> None:
    """Write one line of JSON and, below it, its sha256; the file is replaced atomically."""
    line = content.encode()
    write_durably(path, line + b"\n" + _seal(line) + b"\n")


def read_sealed(path: Path, schema: Any) -> Any:
    """Read a file that :func:`write_sealed` wrote, as the pydantic type ``schema``."""
    line, _, seal = read_bytes(path).removesuffix(b"\n").rpartition(b"\n")
    if seal != _seal(line):
        raise UserError(f"{format_path(path)} is damaged and cannot be used: its checksum differs")
    return parse_json(line, schema, format_path(path))


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
