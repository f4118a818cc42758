"""Tests of runs of one process with full disks, read-only disks and damaged files."""

import errno
import logging
import math
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.errors import UserError
from diffmegatron.training import trainer
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train

SHORT = ["training.steps=12", "checkpoint.interval=4", "training.eval_batches=0"]


def losses(run_dir: Path) -> list[tuple[float, float]]:
    return [(e["step"], e["train/loss"]) for e in read_metrics(run_dir) if "train/loss" in e]


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """Train 12 steps with three checkpoints; return the folder with the recipe and the run."""
    from diffmegatron.config.load import load_recipe
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY.format(run_dir=folder / "run", corpus=corpus))
    train(load_recipe(folder / "tiny.yaml", SHORT))
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a tmpfs of a given number of bytes and returns its path."""
    mounted = []

    def mount(size: int) -> Path:
        place = tmp_path / "small"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {result.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_failed_save_on_a_full_disk_keeps_the_older_checkpoint(
    tiny_recipe, small_disk, finished, tmp_path, caplog
):
    """Check that the run fails at its second save, and resumes after the disk is enlarged.

    The disk has room for 1.5 checkpoints.
    """
    one = read_checkpoint_manifest(finished / "run/checkpoints/step_00000004").size
    disk = small_disk(one * 3 // 2)
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(disk)
    recipe = tiny_recipe(*SHORT)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(
            UserError,
            match=r"cannot write .*rank_00000.*: No space left on device; it needs \d+ bytes and",
        ),
    ):
        train(recipe)
    store = CheckpointStore(run)
    assert store.complete() == store.steps() == [4]
    assert [path.name for path in disk.iterdir()] == ["step_00000004"]
    assert "checkpoint of step 8 failed" in caplog.text
    assert max(e.get("ckpt/failed", 0) for e in read_metrics(run)) >= 3
    assert "saved" not in caplog.text
    subprocess.run(["mount", "-o", f"remount,size={one * 8}", str(disk)], check=True)
    assert train(recipe)
    assert losses(run) == losses(finished / "run")


def test_a_read_only_checkpoint_directory_is_an_error(tiny_recipe, tmp_path, small_disk, caplog):
    disk = small_disk(1 << 20)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(disk)
    with pytest.raises(UserError, match=r"cannot write checkpoints in .*Read-only file system"):
        train(tiny_recipe(*SHORT))
    assert "checkpoint of step 4 failed" in caplog.text


def interrupted(monkeypatch, **at_calls):
    """Make the trainer call functions before its steps.

    ``call_6=f`` calls ``f`` before the sixth of the following steps.
    """
    calls, real = [0], trainer.forward_backward

    def wrapper(*arguments, **options):
        calls[0] += 1
        at_calls.get(f"call_{calls[0]}", lambda: None)()
        return real(*arguments, **options)

    monkeypatch.setattr(trainer, "forward_backward", wrapper)


def fill(disk: Path) -> None:
    """Fill a disk with one large file."""
    with (disk / "filling").open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(b"x" * 512)


def test_a_temporarily_full_disk_neither_ends_the_run_nor_loses_metrics(
    tiny_recipe, small_disk, finished, tmp_path, monkeypatch, caplog
):
    """Check a run on a disk that is full from step 2 to step 11; checkpoints are elsewhere."""
    run = small_disk(1 << 20)
    (tmp_path / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    make_room = (run / "filling").unlink
    interrupted(monkeypatch, call_2=lambda: fill(run), call_12=make_room)
    assert train(tiny_recipe(*SHORT, f"run_dir={run}"))
    said = f"cannot write {run}/metrics.jsonl: No space left on device; the run continues"
    assert caplog.text.count(said) == 1
    assert f"{run}/metrics.jsonl is written again; 0 records lost" in caplog.text
    assert losses(run) == losses(finished / "run")


def remove(run: Path) -> None:
    """Remove a folder although a thread of TensorBoard may create files in it at the same time."""
    while run.exists():
        try:
            shutil.rmtree(run)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise


def replace_by_a_file(run: Path) -> None:
    remove(run)
    run.write_text("")


def remove_and_make(run: Path) -> None:
    """Replace the folder by a new one, which may get the inode of the old one."""
    remove(run)
    run.mkdir()


def move_and_make(run: Path) -> None:
    run.rename(run.with_name("moved"))
    run.mkdir()
    (run / "lock").write_text("another run's")


@pytest.mark.parametrize(
    ("go", "call"),
    [
        (remove, 2),  # before any save
        (remove, 6),  # between two saves
        (remove, 11),  # before the last save
        (replace_by_a_file, 6),
        (remove_and_make, 6),
        (move_and_make, 2),
        (move_and_make, 11),
    ],
)
def test_a_run_ends_at_its_next_save_after_run_dir_is_removed_or_moved(
    go, call, tiny_recipe, monkeypatch
):
    recipe = tiny_recipe(*SHORT)
    run = Path(recipe.run_dir)
    interrupted(monkeypatch, **{f"call_{call}": lambda: go(run)})
    # At call 6, the save of step 4 may be unfinished. If this save then fails, the run ends at step
    # 6. Otherwise, the run ends at its next save, at step 8.
    steps = "6|8" if call == 6 else min(s for s in (4, 8, 12) if s >= call)
    said = f"^run_dir {run} was moved, removed .*; step ({steps}) could not be saved; put it back"
    with pytest.raises(UserError, match=said):
        train(recipe)
    assert not (run / "checkpoints").exists()
    if go is move_and_make:
        assert (run / "lock").read_text() == "another run's", "the new lock must stay"
        assert CheckpointStore(run.with_name("moved")).steps() == [s for s in (4, 8) if s < call]


def test_a_run_continues_if_a_link_replaces_its_moved_run_dir(tiny_recipe, finished, monkeypatch):
    """Check a run whose run_dir is moved before a save and replaced by a link to its new place."""
    recipe = tiny_recipe(*SHORT)
    run = Path(recipe.run_dir)

    def go():
        run.rename(run.with_name("elsewhere"))
        run.symlink_to("elsewhere")

    interrupted(monkeypatch, call_6=go)
    assert train(recipe)
    assert losses(run) == losses(finished / "run")


def test_unwritable_auxiliary_files_do_not_change_the_run(tiny_recipe, finished, tmp_path, caplog):
    """Check that obstructed auxiliary files do not change the losses.

    Folders exist with the names of the files recipe.yaml and metrics.jsonl, and files exist with
    the names of the folders tensorboard and stacks.
    """
    run = tmp_path / "run"
    for name in ("recipe.yaml", "metrics.jsonl"):
        (run / name).mkdir(parents=True)
    for name in ("tensorboard", "stacks"):
        (run / name).write_text("")
    assert train(tiny_recipe(*SHORT))
    assert losses(run) == losses(finished / "run")
    for name in ("recipe.yaml", "tensorboard", "stacks"):
        assert f"cannot write {run}/{name}" in caplog.text
    assert f"it is kept as {run}/metrics.jsonl.damaged_1" in caplog.text


def test_an_unwritable_event_does_not_end_the_run(tiny_recipe, tmp_path, caplog, monkeypatch):
    real, calls = trainer.forward_backward, []

    def broken(engine, *arguments, **options):
        calls.append(1)
        loss = real(engine, *arguments, **options)
        if len(calls) == 3:
            next(engine.network.parameters()).grad *= math.nan
        return loss

    monkeypatch.setattr(trainer, "forward_backward", broken)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").write_text("")
    assert train(tiny_recipe(*SHORT))
    assert f"cannot write {tmp_path}/run/events: File exists; the run continues" in caplog.text
    assert "step 3 skipped" in caplog.text


def test_restarts_record_the_first_evaluation_only_once(tiny_recipe, monkeypatch):
    recipe = tiny_recipe(*SHORT, "training.eval_batches=1")

    def dies():
        raise RuntimeError("killed")

    for call in (1, 2, 3):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed"):
            interrupted(patch, **{f"call_{call}": dies})
            train(recipe)
    assert train(recipe)
    entries = read_metrics(Path(recipe.run_dir))
    assert [e["step"] for e in entries if "valid/loss" in e] == [0, 12]
    assert [e["step"] for e in entries if "train/loss" in e] == [*range(1, 13)]


def flip(path: Path) -> None:
    """Flip one bit in the middle of a checkpoint file, where its tensors are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped byte": lambda newest: flip(newest / "rank_00000.safetensors"),
    "truncated": lambda newest: os.truncate(newest / "rank_00000.safetensors", 5000),
    "missing file": lambda newest: (newest / "state.json").unlink(),
    "missing manifest": lambda newest: (newest / "manifest.json").unlink(),
    "manifest of another step": lambda newest: shutil.copy(
        newest.parent / "step_00000008" / "manifest.json", newest
    ),
    "half a manifest": lambda newest: os.truncate(newest / "manifest.json", 40),
}


def test_a_finished_run_reports_that_nothing_is_left(tiny_recipe, finished, tmp_path, capfd):
    shutil.copytree(finished / "run", tmp_path / "run")
    assert train(tiny_recipe(*SHORT))
    said = capfd.readouterr().out
    assert f"{tmp_path}/run has finished at step 12 of 12; nothing is left to do\n" in said


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_skipped(
    damage, tiny_recipe, finished, tmp_path, caplog, capfd
):
    shutil.copytree(finished / "run", tmp_path / "run")
    DAMAGES[damage](tmp_path / "run" / "checkpoints" / "step_00000012")
    with caplog.at_level(logging.WARNING):
        train(tiny_recipe(*SHORT))
    assert "skipped a damaged checkpoint" in caplog.text and "step_00000012" in caplog.text
    assert "resuming from" in (said := capfd.readouterr().out) and "step_00000008" in said
    assert losses(tmp_path / "run") == losses(finished / "run")
    newest = CheckpointStore(tmp_path / "run").latest()
    assert newest.name == "step_00000012"
    open_checkpoint(newest)


def test_a_manifest_of_another_run_is_found_by_its_checksums(
    tiny_recipe, finished, tmp_path, caplog
):
    other = tiny_recipe(*SHORT, f"run_dir={tmp_path}/other", "training.seed=7")
    train(other)
    shutil.copytree(finished / "run", tmp_path / "run")
    newest = "checkpoints/step_00000012"
    shutil.copy(tmp_path / "other" / newest / "manifest.json", tmp_path / "run" / newest)
    train(tiny_recipe(*SHORT))
    assert "skipped a damaged checkpoint" in caplog.text
    assert losses(tmp_path / "run") == losses(finished / "run")


def test_a_run_without_an_intact_checkpoint_does_not_start_from_scratch(
    tiny_recipe, finished, tmp_path
):
    shutil.copytree(finished / "run", tmp_path / "run")
    for step in CheckpointStore(tmp_path / "run").steps():
        flip(tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / "rank_00000.safetensors")
    with pytest.raises(UserError, match=r"none of the 3 checkpoints in .* is intact"):
        train(tiny_recipe(*SHORT))


def test_saves_remove_old_checkpoints_and_warn_once_if_slow(tiny_recipe, monkeypatch, caplog):
    monkeypatch.setenv("DIFFMEGATRON_KILL_WAIT", "0")
    recipe = tiny_recipe(
        "training.steps=12",
        "training.eval_batches=0",
        "checkpoint.interval=2",
        "checkpoint.keep_last=2",
        "checkpoint.keep_every=6",
    )
    train(recipe)
    assert CheckpointStore(Path(recipe.run_dir)).steps() == [6, 10, 12]
    entries = [e for e in read_metrics(Path(recipe.run_dir)) if "ckpt/bytes" in e]
    assert len(entries) == 6
    assert all(e["ckpt/stall_seconds"] <= e["ckpt/total_seconds"] for e in entries)
    assert caplog.text.count("0 s after a SIGTERM Slurm kills (KillWait)") == 1


@pytest.mark.parametrize("evaluated", [0, 1])
def test_token_ids_outside_the_vocabulary_are_an_error(evaluated, tiny_recipe, corpus, tmp_path):
    """Check that random token ids are an error.

    The file of tokens has the right size, so only the token ids show the mistake.
    """
    for suffix in (".idx", ".json"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"random{suffix}")
    (tmp_path / "random.bin").write_bytes(os.urandom(Path(f"{corpus}.bin").stat().st_size))
    recipe = tiny_recipe(
        f"data.sources=[{{path: {tmp_path}/random}}]", f"training.eval_batches={evaluated}"
    )
    with pytest.raises(UserError, match=r"random.bin holds token id \d+, but .* ids 0 to 256"):
        train(recipe)
