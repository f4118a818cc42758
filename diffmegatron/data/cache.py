"""Folders of arrays that are built once and opened by every rank in constant time."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffmegatron.data.permutation import derive_key
from diffmegatron.errors import UserError

# Raised whenever the same key would give other arrays.
_VERSION = 1

Arrays = tuple[dict[str, np.ndarray], Mapping[str, Any]]


def open_cached(parent: Path, key: tuple[object, ...], build: Callable[[], Arrays]) -> Arrays:
    """Arrays, memory-mapped, and a small JSON-able summary; ``build`` makes them where needed.

    Args:
        parent: folder of the cache.
        key: everything that the arrays depend on.
        build: called at most once per key and file system.

    Raises:
        UserError: the cache cannot be written.
    """
    folder = parent / f"{derive_key(_VERSION, *map(repr, key)):016x}"
    if not folder.is_dir():
        try:
            _build_once(folder, build)
        except OSError as error:
            raise UserError(
                f"cannot write the index cache {parent}: {error.strerror}; set data.cache_dir to a "
                "folder that all ranks can write"
            ) from None
    arrays = {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in folder.glob("*.npy")}
    return arrays, json.loads((folder / "summary.json").read_text())


def _build_once(folder: Path, build: Callable[[], Arrays]) -> None:
    """Fill the folder under a lock; a rename makes it appear whole.

    Where a network file system does not honour the lock between machines, two of them build the
    same bytes and one rename wins.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        temporary = folder.with_suffix(f".{os.uname().nodename}.{os.getpid()}.tmp")
        temporary.mkdir(exist_ok=True)
        arrays, summary = build()
        for name, array in arrays.items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / "summary.json").write_text(json.dumps(summary))
        try:
            temporary.rename(folder)
        except OSError:
            shutil.rmtree(temporary)
            if not folder.is_dir():
                raise
