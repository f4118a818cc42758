"""Files of measurements: the user's cache, with one file per machine, and files at other paths.

The cache is the folder ``$DIFFMEGATRON_CACHE``, ``$XDG_CACHE_HOME/diffmegatron`` or
``~/.cache/diffmegatron``. The name of a file has the hash of its machine, so a new driver, library
or kernel begins a new file.
"""

import logging
import os
from contextlib import suppress
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, os_error_text, read_json, write_durably
from diffmegatron.measurements.machine import Machine
from diffmegatron.measurements.records import Measurements

log = logging.getLogger(__name__)

_VARIABLE = "DIFFMEGATRON_CACHE"
_MAX_BYTES = 1 << 24


def cache_file(machine: Machine) -> Path:
    """Return the path of a machine's file in the user's cache."""
    if own := os.environ.get(_VARIABLE):
        folder = Path(own)
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "diffmegatron")
        with suppress(RuntimeError):  # This user has no home folder.
            folder = folder.expanduser()
    return folder / f"measurements_{machine.digest}.json"


def cached_measurements(machine: Machine) -> Measurements | None:
    """Return the measurements of this machine in the user's cache, or None.

    A file that is damaged, or that belongs to another machine, causes a warning and is not used.
    """
    path = cache_file(machine)
    if not os.path.lexists(path):
        return None
    try:
        found = read_measurements(path)
    except UserError as error:
        log.warning("%s; 'diffmegatron tune' replaces it", error)
        return None
    if found.machine != machine:
        log.warning(
            "%s has measurements of another machine (%s); 'diffmegatron tune' replaces it",
            format_path(path),
            found.machine.name,
        )
        return None
    return found


def read_measurements(path: Path) -> Measurements:
    """Read a file that :func:`write_measurements` wrote, of any machine."""
    found: Measurements = read_json(path, Measurements, max_bytes=_MAX_BYTES)
    return found


def write_measurements(path: Path, measurements: Measurements) -> None:
    """Write measurements atomically; create the folder if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, measurements.model_dump_json(indent=1).encode() + b"\n")
    except OSError as error:
        raise UserError(
            f"cannot write the measurements to {format_path(path)}: {os_error_text(error)}; give "
            f"another file with --out, or a folder in the variable {_VARIABLE}"
        ) from None
