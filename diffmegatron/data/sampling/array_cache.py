"""Cache of arrays on disk, which are built once and memory-mapped by every rank.

Each entry is a folder. A damaged or unfinished entry is built again.
"""

import hashlib
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field

from diffmegatron.data.index.corpus_manifest import hash_file
from diffmegatron.data.sampling.permutation import derive_key
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import (
    file_size,
    format_path,
    open_file,
    os_error_text,
    read_sealed,
    sync_path,
    write_durably,
    write_sealed,
)
from diffmegatron.section import Section

log = logging.getLogger(__name__)

# Part of every key. Increase it when changed code computes other arrays for the same key.
_VERSION = 1
_CONTENTS = "contents.json"
_ADVICE = "set data.cache_dir to a folder that all ranks can write"

Arrays = tuple[dict[str, np.ndarray], Mapping[str, Any]]
"""Arrays by name, and a small JSON-serializable summary."""


class ArrayRecord(Section):
    """One-dimensional array in the file ``NAME.DTYPE``, which contains only the values."""

    dtype: Literal["int32", "int64"]
    length: Annotated[int, Field(ge=0)]
    sha256: str


class _Contents(Section):
    """Table of contents of an entry, written last; an entry without it is unfinished."""

    key: str  # compared with the requested key, because the folder's name is only a hash
    arrays: dict[str, ArrayRecord]
    summary: dict[str, Any]


def cached_arrays(parent: Path, key: tuple[object, ...], build: Callable[[], Arrays]) -> Arrays:
    """Return the memory-mapped arrays and the summary for a key; build them if necessary.

    ``key`` contains all values on which the arrays depend. A file lock ensures that one process at
    a time builds an entry. An existing entry is read completely to verify its checksums.
    """
    name = repr((_VERSION, *key))
    folder = parent / f"{derive_key(name):016x}"
    if (found := _read(folder, name)) is not None:
        return found
    place = f"the index cache {parent}"
    with FileLock(folder.with_suffix(".lock"), place, _ADVICE, patience=math.inf):
        # Another process may have built the entry while this process waited for the lock.
        if (found := _read(folder, name)) is None:
            built = build()
            try:
                _write(folder, name, *built)
            except OSError as error:
                raise UserError(
                    f"cannot write {place}: {os_error_text(error)}; {_ADVICE}"
                ) from None
            found = _read(folder, name)
    if found is None:
        raise UserError(f"{place} does not hold what was written into it; {_ADVICE}")
    return found


def _read(folder: Path, name: str) -> Arrays | None:
    """Return an entry; None if it is missing, is damaged or belongs to another key."""
    try:
        contents: _Contents = read_sealed(folder / _CONTENTS, _Contents)
        arrays = {
            array: _mapped(folder / f"{array}.{record.dtype}", record)
            for array, record in contents.arrays.items()
        }
    except UserError as error:
        if os.path.lexists(folder):
            log.warning("%s; this entry of the index cache is rebuilt", error)
        return None
    return (arrays, contents.summary) if contents.key == name else None


def _mapped(path: Path, record: ArrayRecord) -> np.ndarray:
    if file_size(path) != record.length * np.dtype(record.dtype).itemsize:
        raise UserError(f"{format_path(path)} has another size than it was written with")
    if hash_file(path) != record.sha256:
        raise UserError(f"{format_path(path)} has another content than it was written with")
    if not record.length:
        return np.empty(0, record.dtype)
    with open_file(path) as stream:
        return np.asarray(np.memmap(stream, record.dtype, mode="r", shape=(record.length,)))


def _write(folder: Path, name: str, arrays: dict[str, np.ndarray], summary: Any) -> None:
    """Write an entry to a temporary folder, and rename this folder to ``folder``.

    A damaged entry is renamed and deleted, never overwritten, because other ranks may have mapped
    its files. On a network file system without working locks, two machines may write the same
    entry. Both write equal bytes, so either entry can be used.
    """
    own = f"{os.uname().nodename}.{os.getpid()}"
    temporary, old = folder.with_suffix(f".{own}.tmp"), folder.with_suffix(f".{own}.old")
    _remove(temporary)
    try:
        temporary.mkdir()
        records = {array: _store(temporary, array, values) for array, values in arrays.items()}
        contents = _Contents(key=name, arrays=records, summary=summary)
        write_sealed(temporary / _CONTENTS, contents.model_dump_json())
        if os.path.lexists(folder) and _read(folder, name) is None:
            folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            if _read(folder, name) is None:
                raise
        sync_path(folder.parent)
    finally:
        _remove(temporary)
        _remove(old)


def _store(folder: Path, array: str, values: np.ndarray) -> ArrayRecord:
    values = np.ascontiguousarray(values)
    write_durably(folder / f"{array}.{values.dtype}", values.data)
    return ArrayRecord(
        dtype=cast(Literal["int32", "int64"], str(values.dtype)),
        length=len(values),
        sha256=hashlib.sha256(values.data).hexdigest(),
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
