"""Output and exit status of ``diffmegatron checkpoint``."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.commands.checkpoint import app
from diffmegatron.errors import UserError
from tests.checkpoints import NAMES, change_json, sign, write_checkpoint
from tests.permissions import without_roots_power


@pytest.fixture
def run_dir(tmp_path) -> Path:
    for step in (10, 20, 30):
        write_checkpoint(tmp_path, step)
    return tmp_path


def invoke(*arguments: object):
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(each) for each in arguments])


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {
    "cut": lambda path: os.truncate(path / "state.json", 3),
    "a FIFO": lambda path: fifo(path / "state.json"),
    "the manifest a FIFO": lambda path: fifo(path / "manifest.json"),
    "deep": lambda path: (path / "manifest.json").write_text("[" * 100_000),
    "a large number": lambda path: (path / "manifest.json").write_text("1" + "0" * 6000),
    "a long name": lambda path: change_json(
        path / "manifest.json", lambda manifest: manifest["files"][0].update(name="n" * 5000)
    ),
    "what a table takes for markup": lambda path: change_json(
        path / "manifest.json", lambda manifest: manifest["files"][0].update(name="[/bold]")
    ),
    "a file in its place": lambda path: (path.rename(path.parent / "aside"), path.write_text("")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_list_and_verify_report_one_damaged_checkpoint_among_others(damage, run_dir):
    DAMAGES[damage](run_dir / "checkpoints/step_00000020")
    listed = invoke("list", run_dir)
    assert listed.exit_code == 0, listed.exception
    assert listed.output.count("complete") == 2
    assert listed.output.count("damaged: ") == 1
    verified = invoke("verify", run_dir)
    assert verified.exit_code == 1
    assert verified.output.count(": good, ") == 2
    assert verified.output.count(": damaged: ") == 1
    assert len(verified.output) < 2000


def test_verify_reads_every_byte(run_dir):
    assert invoke("verify", run_dir).exit_code == 0
    path = run_dir / "checkpoints/step_00000020/rank_00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = invoke("verify", run_dir)
    assert result.exit_code == 1
    assert result.output.count("good") == 2
    assert "checksum" in result.output
    assert invoke("verify", run_dir / "checkpoints/step_00000020").exit_code == 1
    assert invoke("verify", run_dir / "checkpoints/step_00000010").exit_code == 0
    assert "complete" in invoke("list", run_dir).output, "``list`` compares only the sizes of files"


def test_inspect_shows_a_good_checkpoint_and_refuses_an_invalid_one(run_dir):
    path = run_dir / "checkpoints/step_00000020"
    result = invoke("inspect", path)
    assert result.exit_code == 0
    named, _, content = result.output.partition("\n")
    assert named.startswith(f"{path}, ")
    state, _, tensors = content.partition("\n}\n")
    assert json.loads(f"{state}\n}}")["step"] == 20
    assert all(name in tensors for name in NAMES)
    (path / "state.json").write_text("{}")
    sign(path)
    assert "Field required at step" in invoke("verify", path).output
    assert isinstance(invoke("inspect", path).exception, UserError)


def test_inspect_of_a_run_dir_shows_the_newest_complete_checkpoint(run_dir):
    (run_dir / "checkpoints/step_00000030/state.json").unlink()
    result = invoke("inspect", run_dir)
    assert result.output.startswith(f"{run_dir}/checkpoints/step_00000020, ")
    assert '"step": 20' in result.output


def test_inspect_of_a_run_dir_without_complete_checkpoints_is_an_error(run_dir):
    for state in run_dir.glob("checkpoints/*/state.json"):
        state.unlink()
    error = str(invoke("inspect", run_dir).exception)
    assert error.startswith(f"{run_dir} has no complete checkpoint; run diffmegatron checkpoint ")


def test_prune_removes_checkpoints_except_in_a_dry_run(run_dir):
    dry = invoke("prune", run_dir, "--keep-last", 1, "--keep-every", 20, "--dry-run")
    assert "would remove" in dry.output
    assert CheckpointStore(run_dir).steps() == [10, 20, 30]
    assert invoke("prune", run_dir, "--keep-last", 1, "--keep-every", 20).exit_code == 0
    assert CheckpointStore(run_dir).steps() == [20, 30]
    again = invoke("prune", run_dir, "--keep-last", 2)
    assert "nothing to remove among 2 complete checkpoints" in again.output


def test_verifying_a_missing_folder_is_an_error(tmp_path):
    for name in ("nope", "n" * 5000):
        result = invoke("verify", tmp_path / name)
        assert isinstance(result.exception, UserError)
        assert "is not a folder" in str(result.exception)


def test_listing_a_folder_without_checkpoints_is_an_error(tmp_path):
    for path in (tmp_path, tmp_path / ("n" * 5000)):
        result = invoke("list", path)
        assert isinstance(result.exception, UserError)
        assert "has no checkpoints" in str(result.exception)


def test_verifying_a_run_without_checkpoints_is_an_error(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    verified = invoke("verify", tmp_path)
    assert isinstance(verified.exception, UserError)
    assert "has no checkpoint yet" in str(verified.exception)


def test_a_checkpoint_that_cannot_be_removed_stays_complete(run_dir):
    """Check that ``prune`` raises an error if the folder of a checkpoint is read-only."""
    foreign = run_dir / "checkpoints/step_00000010"
    foreign.chmod(0o500)
    with without_roots_power():
        pruned = invoke("prune", run_dir, "--keep-last", 1)
    foreign.chmod(0o700)
    assert isinstance(pruned.exception, PermissionError)
    assert pruned.exception.filename == str(foreign)
    assert CheckpointStore(run_dir).complete() == [10, 20, 30]
