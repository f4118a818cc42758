"""JSON files that contain a checksum of their content, for state that users never edit.

If a damaged disk changes a number in a JSON file, the file is still valid JSON. A program that used
a wrong number of documents would skip or repeat documents unnoticed. The checksum reveals the
change.
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
    """Read a file written by :func:`write_sealed`; pydantic checks the content against ``schema``.

    Raises:
        UserError: the file is missing, was changed, or does not fit the schema.
    """
    line, _, seal = read_bytes(path).removesuffix(b"\n").rpartition(b"\n")
    if seal != _seal(line):
        raise UserError(f"{format_path(path)} is damaged and cannot be used: its checksum differs")
    return parse_json(line, schema, format_path(path))


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
