"""Files of measurements: the user's cache, with one file per machine, and files at other paths.

The cache is the folder ``$DIFFMEGATRON_CACHE``, ``$XDG_CACHE_HOME/diffmegatron`` or
``~/.cache/diffmegatron``. The name of a file has the hash of its machine, so a new driver, library
or kernel begins a new file.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.files import (
    check_replaceable,
    create_file,
    format_path,
    os_error_text,
    read_json,
    write_durably,
)
from diffmegatron.measurements.machine import Machine, this_machine
from diffmegatron.measurements.records import Measurements

log = logging.getLogger(__name__)

_VARIABLE = "DIFFMEGATRON_CACHE"
_PREFIX = "measurements_"
_MAX_BYTES = 1 << 24


def cache_file(machine: Machine) -> Path:
    """Return the path of a machine's file in the user's cache."""
    return _folder() / f"{_PREFIX}{machine.digest}.json"


def _folder() -> Path:
    if own := os.environ.get(_VARIABLE):
        return Path(own)
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "diffmegatron")
    with suppress(RuntimeError):  # This user has no home folder.
        folder = folder.expanduser()
    return folder


def measurements_here(device_type: str) -> Measurements | None:
    """Return the cached measurements of this machine for a device type, or None."""
    try:
        has_any = any(each.name.startswith(_PREFIX) for each in _folder().iterdir())
    except OSError:  # Most users have no such folder.
        return None
    machine = this_machine() if has_any else None
    if machine is None or machine.device_type != device_type:
        return None
    return cached_measurements(machine)


def cached_gpus() -> list[Measurements]:
    """Return the measurements of GPUs in the user's cache, oldest first, without damaged files.

    A file may belong to a GPU, driver or library that this machine no longer has.
    """
    found = []
    with suppress(OSError):
        files = _folder().glob(f"{_PREFIX}*.json")
        for path in sorted(files, key=lambda path: path.stat().st_mtime):
            with suppress(UserError):
                found.append(read_measurements(path))
    return [each for each in found if each.machine.device_type == "cuda"]


def cached_measurements(machine: Machine) -> Measurements | None:
    """Return the measurements of this machine in the user's cache, or None."""
    return measurements_of(machine, cache_file(machine))


def measurements_of(machine: Machine, path: Path) -> Measurements | None:
    """Return the measurements of a machine in a file, or None.

    A file that is damaged, or that belongs to another machine, causes a warning and is not used.
    """
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
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, measurements.model_dump_json(indent=1).encode() + b"\n")


def check_writable(path: Path) -> None:
    """Raise the error that :func:`write_measurements` would raise; an existing file stays."""
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path)
        trial = path.with_name(f"{path.name}.tmp")
        create_file(trial).close()
        trial.unlink()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a path with a null character.
        raise UserError(
            f"cannot write the measurements to {format_path(path)}: {os_error_text(error)}; give "
            f"another file with --out, or a folder in the variable {_VARIABLE}"
        ) from None
