"""Tests of ``CheckpointStore``: damaged and unfinished checkpoints, retention, and errors."""

import logging
import shutil
from pathlib import Path

import pytest

from diffmegatron.checkpoint.checkpoint_manifest import (
    CheckpointManifest,
    describe_file,
    read_checkpoint_manifest,
    write_manifest,
)
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore, prunable
from diffmegatron.errors import UserError


def write(store: CheckpointStore, step: int, content: bytes = b"weights") -> Path:
    directory = store.begin(step)
    (directory / "data").write_bytes(content)
    write_manifest(directory, CheckpointManifest(step, (describe_file(directory / "data"),)))
    return store.commit(step)


def test_committed_checkpoints_are_listed_and_the_newest_is_latest(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    write(store, 20)
    path = write(store, 100)
    assert path.name == "step_00000100"
    assert store.steps() == [20, 100]
    assert store.latest() == path


def test_unfinished_checkpoints_are_not_listed(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 10)
    (store.begin(20) / "data").write_bytes(b"half")
    assert store.steps() == [10]
    store.abandon(20)
    assert [path.name for path in store.directory.iterdir()] == ["step_00000010"]


def test_saving_a_step_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path)
    write(store, 10, b"old")
    assert (write(store, 10, b"new") / "data").read_bytes() == b"new"


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_latest_skips_a_damaged_checkpoint_with_a_warning(damage, tmp_path, caplog):
    store = CheckpointStore(tmp_path)
    good, bad = write(store, 10), write(store, 20)
    if damage == "truncate":
        (bad / "data").write_bytes(b"we")
    elif damage == "delete":
        (bad / "data").unlink()
    else:
        (bad / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert store.latest() == good
    assert "step_00000020" in caplog.text


def test_a_manifest_of_another_step_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    other, path = write(store, 10), write(store, 20)
    shutil.copy(other / "manifest.json", path / "manifest.json")
    with pytest.raises(UserError, match="is of step 10, not of step_00000020"):
        read_checkpoint_manifest(path)


def test_links_are_refused(tmp_path):
    path = write(CheckpointStore(tmp_path), 10)
    (path / "data").rename(tmp_path / "elsewhere")
    (path / "data").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        read_checkpoint_manifest(path)


def test_retention_keeps_the_newest_and_the_multiples(tmp_path):
    store = CheckpointStore(tmp_path)
    for step in range(10, 80, 10):
        write(store, step)
    (store.path(60) / "data").unlink()  # a damaged checkpoint is neither counted nor removed
    assert prunable(store.complete(), 2, None) == [10, 20, 30, 40]
    assert prunable(store.complete(), 2, 30) == [10, 20, 40]
    assert prunable(store.complete(), 9, None) == []
    for step in prunable(store.complete(), 2, 30):
        store.remove(step)
    assert store.steps() == [30, 50, 60, 70]


def test_an_interrupted_removal_leaves_no_partial_checkpoint(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    write(store, 10)

    def killed(path, ignore_errors=False):
        if path.exists():
            (path / "data").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("diffmegatron.checkpoint.checkpoint_store.shutil.rmtree", killed)
        store.remove(10)
    assert store.steps() == []
    store.begin(20)
    assert [path.name for path in store.directory.iterdir()] == ["step_00000020.unfinished"]


def test_a_missing_checkpoint_path_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not a checkpoint: it does not exist"):
        read_checkpoint_manifest(tmp_path / "nowhere")


def test_an_unreadable_folder_is_an_error_not_an_empty_store(tmp_path):
    for name in ("n" * 5000, "a\0b"):
        with pytest.raises(UserError, match="cannot read"):
            CheckpointStore(tmp_path / name).steps()
    (tmp_path / "checkpoints").write_text("a file in the way")
    assert CheckpointStore(tmp_path).steps() == []


def test_an_unwritable_store_is_an_error(tmp_path):
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UserError, match="cannot write checkpoints"):
        CheckpointStore(tmp_path).begin(1)
