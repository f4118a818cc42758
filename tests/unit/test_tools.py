"""The scripts of ``tools/`` run the commands that their docstrings and tools/README.md name."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest

from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from tests.paths import ROOT

SCRIPTS = {
    "average_checkpoints.py": "checkpoint average",
    "export_hf.py": "export",
    "import_hf.py": "import",
    "inspect_checkpoint.py": "checkpoint inspect",
    "prepare_data.py": "prepare",
}


def run(script: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Run a script in this process, and return its exit status."""
    path = str(ROOT / "tools" / script)
    monkeypatch.setattr(sys, "argv", [path, *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(path, run_name="__main__")
    return ended.value.code


def test_every_script_is_listed() -> None:
    page = (ROOT / "tools/README.md").read_text()
    listed = dict(re.findall(r"`python tools/(\w+\.py)` \| `diffmegatron ([\w ]+)`", page))
    paths = set((ROOT / "tools").glob("*.py")) - {
        ROOT / "tools/__init__.py",
        ROOT / "tools/paths.py",
    }
    assert listed == SCRIPTS and {path.name for path in paths} == set(SCRIPTS)
    for path in paths:
        text = path.read_text()
        assert f"``diffmegatron {SCRIPTS[path.name]}``" in ast.get_docstring(ast.parse(text))
        assert len(text.splitlines()) <= 20


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_is_that_of_the_command(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not run(script, "--help", monkeypatch=monkeypatch)
    assert f"Usage: diffmegatron {SCRIPTS[script]} [OPTIONS]" in capsys.readouterr().out


def test_data_are_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("Fourteen words of text.")
    words = [str(tmp_path / "text.txt"), "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    assert not run("prepare_data.py", *words, monkeypatch=monkeypatch)
    assert read_corpus_manifest(tmp_path / "out").documents == 1


def test_a_user_error_exits_with_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "missing"), str(tmp_path / "out")]
    assert run("export_hf.py", *words, monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.startswith("error: ")
