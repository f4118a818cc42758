"""The index cache returns the arrays that were built, whatever its folder contains."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diffmegatron.data.sampling import array_cache as module
from diffmegatron.data.sampling.array_cache import Arrays, cached_arrays
from diffmegatron.errors import UserError

KEY = ("documents", "sha", 3)


def build() -> Arrays:
    arrays = {
        "documents": np.arange(1000, dtype=np.int64),
        "starts": np.arange(7, dtype=np.int32),
        "empty": np.empty(0, dtype=np.int64),
    }
    return arrays, {"lengths": [{"at_least": 2}]}


def check(found: Arrays) -> None:
    arrays, summary = found
    expected, said = build()
    assert summary == said
    assert arrays.keys() == expected.keys()
    for name, values in arrays.items():
        assert values.dtype == expected[name].dtype
        assert np.array_equal(values, expected[name])


def refuse() -> Arrays:
    pytest.fail("built again")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Fill a cache with one entry, and return the folder of this entry."""
    check(cached_arrays(tmp_path / "cache", KEY, build))
    (found,) = (tmp_path / "cache").iterdir()
    return found


def test_a_cache_entry_is_built_once(folder: Path) -> None:
    check(cached_arrays(folder.parent, KEY, refuse))
    check(cached_arrays(folder.parent, (*KEY, "other"), build))
    assert len(list(folder.parent.iterdir())) == 2


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


FILES = ("contents.json", "documents.int64", "starts.int32")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, empty, Path.unlink, become_fifo, become_folder])
def test_a_damaged_cache_entry_is_rebuilt(
    folder: Path, name: str, damage: Callable[[Path], None], caplog: Any
) -> None:
    damage(folder / name)
    check(cached_arrays(folder.parent, KEY, build))
    assert "this entry of the index cache is rebuilt" in caplog.text and name in caplog.text
    check(cached_arrays(folder.parent, KEY, refuse))
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.parametrize("place", [Path.mkdir, Path.touch, os.mkfifo])
def test_a_file_or_folder_in_place_of_an_entry_is_replaced(
    folder: Path, place: Callable[[Path], None]
) -> None:
    shutil.rmtree(folder)
    place(folder)
    check(cached_arrays(folder.parent, KEY, build))
    assert list(folder.parent.iterdir()) == [folder]


def test_an_entry_of_another_key_is_replaced(folder: Path) -> None:
    other = folder.parent.parent / "other"
    cached_arrays(other, (*KEY, "other"), lambda: ({"documents": np.zeros(3, dtype=np.int64)}, {}))
    (foreign,) = other.iterdir()
    shutil.rmtree(folder)
    foreign.rename(folder)
    check(cached_arrays(folder.parent, KEY, build))


def test_mapped_arrays_survive_a_rebuild(folder: Path) -> None:
    arrays, _ = cached_arrays(folder.parent, KEY, refuse)
    (folder / "contents.json").unlink()
    check(cached_arrays(folder.parent, KEY, build))
    assert np.array_equal(arrays["documents"], np.arange(1000))


def test_the_first_rename_wins_without_a_lock(tmp_path: Path, monkeypatch: Any) -> None:
    def overtaken() -> Arrays:
        if not (tmp_path / "overtaken").exists():
            (tmp_path / "overtaken").touch()
            with monkeypatch.context() as patch:
                # The temporary folder of an entry has the process id in its name.
                patch.setattr(os, "getpid", lambda: 1)
                patch.setattr("fcntl.flock", lambda *_: None)
                cached_arrays(tmp_path / "cache", KEY, build)
        return build()

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    check(cached_arrays(tmp_path / "cache", KEY, overtaken))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_full_disk_leaves_no_entry(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_sealed", full)
        with pytest.raises(UserError, match=r"cannot write the index cache .*: No space left"):
            cached_arrays(tmp_path / "cache", KEY, build)
    assert not list(tmp_path.glob("cache/*"))
    check(cached_arrays(tmp_path / "cache", KEY, build))


def test_a_read_only_cache_is_used_while_its_entry_is_intact(
    folder: Path, monkeypatch: Any
) -> None:
    def read_only(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("diffmegatron.file_lock.FileLock._open", read_only)
    check(cached_arrays(folder.parent, KEY, refuse))
    flip(folder / "documents.int64")
    with pytest.raises(UserError, match=r"Read-only file system; set data\.cache_dir"):
        cached_arrays(folder.parent, KEY, build)
