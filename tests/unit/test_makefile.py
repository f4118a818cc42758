"""Tests of the Makefile."""

import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def test_the_newest_python_is_looked_for_once(tmp_path: Path) -> None:
    """Check how often stubs of Python are started, because such a stub may take seconds."""
    for name in ("python3.13", "python3.12", "python3.11", "python3"):
        stub = tmp_path / name
        stub.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/log\nexec {sys.executable} "$@"\n'
        )
        stub.chmod(0o755)
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    listed = subprocess.run(
        ["make", "--dry-run", "quickstart"],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "python3.13 -m venv .venv" in listed.stdout
    starts = (tmp_path / "log").read_text().splitlines()
    assert starts == ["python3.13 -c ", "python3.13 -m pip config list"]
