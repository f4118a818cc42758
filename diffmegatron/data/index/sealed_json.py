"""JSON files with their own checksum, for state that users never edit.

A number changed by a damaged disk is still valid JSON, and would lose or repeat documents.
"""

import hashlib
from pathlib import Path
from typing import Any

from diffmegatron.errors import UserError
from diffmegatron.files import parse_json, read_bytes, shown, write_durably


def write_sealed(path: Path, content: str) -> None:
    """Write JSON on one line and its sha256 on the next, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    line = content.encode()
    write_durably(path, line + b"\n" + _seal(line) + b"\n")


def read_sealed(path: Path, schema: Any) -> Any:
    """Return the value of a file of :func:`write_sealed`, validated against a pydantic schema.

    Raises:
        UserError: the file is missing, was changed, or does not fit the schema.
    """
    line, _, seal = read_bytes(path).removesuffix(b"\n").rpartition(b"\n")
    if seal != _seal(line):
        raise UserError(f"{shown(path)} is damaged and cannot be used: its checksum differs")
    return parse_json(line, schema, shown(path))


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
