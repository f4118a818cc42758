"""Check every shell script of the repository with shellcheck."""

import shutil
import subprocess

import pytest

from tests.paths import ROOT

SCRIPTS = [ROOT / ".ci/run", *sorted((ROOT / "launch").glob("*.sh"))]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(
        ["shellcheck", str(script)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout
