"""``diffmegatron checkpoint``: what it prints and how it exits."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffmegatron.checkpoint.commands import app
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.errors import UserError
from tests.unit.test_store import write


@pytest.fixture
def run_dir(tmp_path) -> Path:
    store = CheckpointStore(tmp_path)
    for step in (10, 20, 30):
        write(store, step)
    return tmp_path


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_list_shows_what_is_complete_and_what_is_not(run_dir):
    (run_dir / "checkpoints/step_00000020/data").write_bytes(b"cut")
    result = invoke("list", run_dir)
    assert result.exit_code == 0
    assert result.output.count("complete") == 2
    assert "damaged" in result.output


def test_verify_reads_every_byte(run_dir):
    assert invoke("verify", run_dir).exit_code == 0
    (run_dir / "checkpoints/step_00000020/data").write_bytes(b"weightz")
    result = invoke("verify", run_dir)
    assert result.exit_code == 1
    assert result.output.count("good") == 2
    assert "checksum" in result.output
    assert invoke("verify", run_dir / "checkpoints/step_00000020").exit_code == 1
    assert invoke("verify", run_dir / "checkpoints/step_00000010").exit_code == 0


def test_prune_says_what_it_would_do_and_does_it(run_dir):
    dry = invoke("prune", run_dir, "--keep-last", 1, "--keep-every", 20, "--dry-run")
    assert "would remove" in dry.output
    assert CheckpointStore(run_dir).steps() == [10, 20, 30]
    assert invoke("prune", run_dir, "--keep-last", 1, "--keep-every", 20).exit_code == 0
    assert CheckpointStore(run_dir).steps() == [20, 30]
    again = invoke("prune", run_dir, "--keep-last", 2)
    assert "nothing to remove of 2 complete checkpoints" in again.output


def test_verifying_what_is_not_there_is_a_sentence(tmp_path):
    result = invoke("verify", tmp_path / "nope")
    assert isinstance(result.exception, UserError)
    assert "is no folder" in str(result.exception)


def test_a_folder_without_checkpoints_is_a_sentence(tmp_path):
    result = invoke("list", tmp_path)
    assert isinstance(result.exception, UserError)
    assert "has no checkpoints" in str(result.exception)
