"""Tests of the stages and checkpoints found in the ``run_dir`` of a recipe with stages."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.stage_folders import (
    earlier_stages,
    newest_checkpoint,
    stage_folders,
)
from diffmegatron.commands.checkpoint import app
from diffmegatron.errors import UserError
from tests.checkpoints import write_checkpoint


def add_stage(run: Path, name: str, start: str | None, *steps: int) -> None:
    (run / name / "checkpoints").mkdir(parents=True)
    for step in steps:
        write_checkpoint(run / name, step)
    recipe = run / name / "recipe.yaml"
    if not steps:
        write_checkpoint(run.parent / "aside", 1)
        recipe.write_text((run.parent / "aside/recipe.yaml").read_text())
    if start is not None:
        text = recipe.read_text()
        assert "checkpoint:\n" in text
        line = f"checkpoint:\n  start_from: runs/elsewhere/../{run.name}/{start}\n"
        recipe.write_text(text.replace("checkpoint:\n", line))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a ``run_dir`` with three stages, which trained in reverse alphabetical order."""
    run = tmp_path / "run"
    add_stage(run, "pretrain", None, 10, 20)
    add_stage(run, "extend", "pretrain", 4, 5, 6)
    add_stage(run, "chat", "extend")
    (run / "attempts").mkdir()
    return run


def invoke(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.exception
    return result.output


def test_stages_come_in_the_order_of_their_starts(run: Path) -> None:
    assert [folder.name for folder in stage_folders(run)] == ["pretrain", "extend", "chat"]
    assert newest_checkpoint(run) == CheckpointStore(run / "extend").path(6)
    assert newest_checkpoint(run / "pretrain") == CheckpointStore(run / "pretrain").path(20)
    assert newest_checkpoint(run / "attempts") is None
    assert [each.name for each in earlier_stages(run / "chat")] == ["extend", "pretrain"]
    assert not earlier_stages(run / "pretrain")


def test_several_last_stages_are_refused(run: Path) -> None:
    add_stage(run, "math", "pretrain", 7)
    with pytest.raises(
        UserError,
        match=r"several stages from which no other stage started; give one of .*extend, .*math",
    ):
        newest_checkpoint(run)
    assert [folder.name for folder in stage_folders(run)] == ["pretrain", "extend", "math", "chat"]


def test_stages_that_start_from_each_other_are_refused(tmp_path: Path) -> None:
    """Edited recipes can form a circle, in which no stage is the last."""
    add_stage(tmp_path / "run", "extend", "chat", 4)
    add_stage(tmp_path / "run", "chat", "extend", 5)
    with pytest.raises(UserError, match=r"start from each other; give one of .*chat, .*extend"):
        newest_checkpoint(tmp_path / "run")
    assert [each.name for each in earlier_stages(tmp_path / "run/chat")] == ["extend", "chat"]


def test_commands_name_the_stage(run: Path) -> None:
    listed = [
        line.split()[1:4:2] for line in invoke("list", run).splitlines() if "complete" in line
    ]
    pretrain, extend = [["pretrain", step] for step in ("10", "20")], ["extend"]
    assert listed == [*pretrain, *([*extend, step] for step in ("4", "5", "6"))]
    assert invoke("verify", run).count(": good, ") == 5
    said = invoke("prune", run, "--keep-last", 1)
    assert said.count("removed ") == 3
    assert "nothing to remove among 0 complete checkpoints of stage chat" in said
    assert CheckpointStore(run / "pretrain").steps() == [20]
    assert CheckpointStore(run / "extend").steps() == [6]
