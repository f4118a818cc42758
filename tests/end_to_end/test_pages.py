"""Tests that every command of README.md and of docs is valid, and that the cheap commands run.

The real programs parse the commands. The tests fail for unknown options, missing arguments, missing
files in the folders of ``SHIPPED``, missing targets of the Makefile and unknown keys of a recipe.

The commands of ``RUNS`` are those of a user's first hour on a CPU. They also run, in one folder and
in the order of the pages. A command is left out if a file that it reads does not exist when its
turn comes. The other commands are only parsed:

- commands for another machine: ``launch``, ``preflight``, ``sbatch``, ``launch/*.sh``,
  ``torchrun``, benchmarks on a GPU;
- commands that take minutes: ``make quickstart``, ``make test``, ``--rehearse``, ``--search``; and
  benchmarks, campaigns and ``evaluate``, which have their own tests;
- commands that need files of the user: ``import``, ``dex select`` and the recipes of
  docs/pretrained.md, which tests/unit/hf/test_import_model.py runs on a tiny model.
"""

import argparse
import importlib
import re
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from diffmegatron.cli import app, main
from diffmegatron.config.load import load_stages
from tests.end_to_end.page_commands import PAGES, ROOT, Command, commands_of

COMMANDS = [command for page in PAGES for command in commands_of(page)]
SHIPPED = ("configs/", "docs/", "launch/", "tests/", "tools/")
TAKE_A_RECIPE = {"plan", "train", "launch", "preflight"}
RUNS = {
    ("doctor",),
    ("plan",),
    ("prepare",),
    ("train",),
    ("export",),
    ("generate",),
    ("data", "verify"),
    ("data", "inspect"),
    ("configs", "list"),
    *(("checkpoint", each) for each in ("list", "verify", "prune", "inspect")),
}
# Overrides that make the training run of the README small.
SHORTER = [
    "training.steps=2",
    "training.seq_length=64",
    "training.eval_batches=1",
    "optimizer.schedule.warmup_steps=1",
    "model.num_layers=1",
]


class ParsedError(Exception):
    """Error that ends a program after it has parsed its arguments, before it does any work."""


def parse(command: Any, name: str, words: list[str], parent: Any = None) -> tuple[list[str], dict]:
    """Return the subcommands in ``words`` and the parameter values of the last subcommand."""
    context = command.make_context(name, list(words), parent=parent)
    if not hasattr(command, "resolve_command"):
        return [], context.params
    rest = [*context._protected_args, *context.args]
    child, found, left = command.resolve_command(context, rest)
    names, values = parse(found, child, left, context)
    return [child, *names], values


def parsed(words: list[str]) -> tuple[tuple[str, ...], dict]:
    """Return the subcommands and the parameter values of a ``diffmegatron`` command."""
    names, values = parse(typer.main.get_command(app), "diffmegatron", words)
    return tuple(names), values


def made_by_copying(page: str) -> set[str]:
    """Return the targets of the ``cp`` commands of a page."""
    return {each.words[-1] for each in COMMANDS if each.page == page and each.program == "cp"}


def identified(command: Command) -> str:
    return f"{command.page}: {command.line[:70]}"


@pytest.mark.parametrize("command", COMMANDS, ids=identified)
def test_every_command_of_the_pages_is_valid(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    copied = made_by_copying(command.page)
    for word in [command.program, *command.words]:
        if word.startswith(SHIPPED) and word not in copied:
            assert Path(word).exists(), f"{word} is not there"
    if command.program == "diffmegatron":
        names, values = parsed(command.words)
        # A kind of attention that `--import` adds is tested in tests/unit/test_own_code.py.
        if names[0] in TAKE_A_RECIPE and "--import" not in command.words:
            recipe = values["config" if "config" in values else "recipe"]
            # The recipes of docs/pretrained.md are not files. Check their overrides with another
            # recipe that starts from a pretrained model.
            path = recipe if recipe.exists() else Path("configs/dex/llama_3.2_1b.yaml")
            load_stages(path, values["overrides"] or [], allow_missing_files=True)
    elif command.program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(command.words) <= set(targets)
    elif command.program == "pytest":
        assert all(list(ROOT.glob(each)) for each in command.words if not each.startswith("-"))
    elif command.program not in ("cp", "sbatch") and not command.program.endswith(".sh"):
        understood_by_argparse(command, monkeypatch)


def understood_by_argparse(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, words: list[str] | None = None) -> None:
        parse_args(parser, words)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [command.program, *command.words])
    with pytest.raises(ParsedError):
        if command.program.endswith(".py"):
            runpy.run_path(command.program, run_name="__main__")
        elif command.program == "tools.benchmarks":
            importlib.import_module("tools.benchmarks.__main__").main(command.words)
        else:
            importlib.import_module(command.program).main()


def test_the_pages_have_commands() -> None:
    programs = [command.program for command in COMMANDS]
    assert programs.count("diffmegatron") > 40 and programs.count("tools.benchmarks") > 4
    assert any(
        command.page == "README.md" and command.words[:1] == ["train"] for command in COMMANDS
    )


@pytest.mark.parametrize(
    "words", [["plan"], ["plan", "configs/quickstart.yaml", "--gpu"], ["traim"], ["data", "merg"]]
)
def test_a_wrong_command_is_rejected(words: list[str]) -> None:
    with pytest.raises(Exception, match=r"(?i)missing|no such"):
        parsed(words)


def test_the_cheap_commands_of_the_pages_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that the cheap commands succeed in a folder with the configs and docs."""
    for name in ("configs", "docs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    from diffmegatron.optim.zero import import_deepspeed

    monkeypatch.chdir(tmp_path)
    import_deepspeed()  # The first import of DeepSpeed in a process may print warnings.
    run_dir = next(
        word.removeprefix("run_dir=")
        for command in COMMANDS
        for word in command.words
        if command.page == "README.md" and word.startswith("run_dir=")
    )
    step = f"{run_dir}/checkpoints/step_00000002"
    ran = []
    for command in COMMANDS:
        words = [word.replace("RUN_DIR/checkpoints/step_00001000", step) for word in command.words]
        words = [word.replace("RUN_DIR", run_dir) for word in words]
        if command.program == "diffmegatron" and is_cheap(words, command):
            more = SHORTER if words[0] == "train" else []
            # The last override of a key wins, so SHORTER replaces the overrides of the page.
            monkeypatch.setattr(sys, "argv", ["diffmegatron", *words, *more])
            try:
                main()
            except SystemExit as ended:
                assert not ended.code, f"{command.line}\n{capsys.readouterr().err}"
            ran.append(parsed(words)[0])
    assert Path(run_dir, "checkpoints").is_dir() and Path("runs/example/hf/config.json").is_file()
    assert {("doctor",), ("plan",), ("prepare",), ("train",), ("export",)} <= set(ran)
    assert ("checkpoint", "verify") in ran
    shutil.rmtree("runs")


def is_cheap(words: list[str], command: Command) -> bool:
    """Return whether a command is in ``RUNS``, is fast, and finds every file that it reads."""
    names, values = parsed(words)
    if names not in RUNS or command.line.startswith("torchrun"):
        return False
    if values.get("rehearse") or values.get("search") or values.get("tokenizer") == "cl100k_base":
        return False
    if values.get("engine") == "vllm":
        return False
    read = [values.get(key) for key in ("config", "checkpoint", "run_dir", "path", "prefix")]
    read += [*(values.get("inputs") or []), *(values.get("prefixes") or [])]
    # --hardware is the name of a GPU or a file of measurements.
    read += [each for each in [values.get("hardware")] if str(each).endswith(".json")]
    if not all(Path(each).exists() or Path(f"{each}.json").exists() for each in read if each):
        return False
    if names in {("train",), ("data", "inspect")}:
        stages = load_stages(values["config"], values["overrides"] or [])
        return all(Path(f"{each.path}.json").exists() for each in stages[0].data.sources)
    return True
