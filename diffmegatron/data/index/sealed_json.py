"""JSON files that carry their own checksum: state of ours that nobody edits by hand.

A number that a damaged disk changed is still JSON; believed, it would lose or repeat documents.
"""

import hashlib
from pathlib import Path
from typing import Any

from diffmegatron.errors import UserError
from diffmegatron.files import parse_json, read_bytes, shown, write_durably


def write_sealed(path: Path, content: str) -> None:
    """Write JSON on one line and its sha256 on the next, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    line = content.encode()
    write_durably(path, line + b"\n" + _seal(line) + b"\n")


def read_sealed(path: Path, schema: Any) -> Any:
    """What :func:`write_sealed` wrote, as :func:`diffmegatron.files.parse_json` gives it.

    Raises:
        UserError: it is missing, no ordinary file, was changed, or is of another schema.
    """
    line, _, seal = read_bytes(path).removesuffix(b"\n").rpartition(b"\n")
    if seal != _seal(line):
        raise UserError(f"{shown(path)} is damaged and cannot be used: its checksum is another")
    return parse_json(line, schema, shown(path))


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
