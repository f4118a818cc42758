"""Every script of the shell in the repository, read by shellcheck."""

import shutil
import subprocess

import pytest

from tests.paths import ROOT

SCRIPTS = sorted(
    path for path in [ROOT / ".ci/run", *ROOT.glob("launch/*.sh")] if not path.is_symlink()
) + sorted(ROOT.glob("diffmegatron/**/*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run(
        ["shellcheck", str(script)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout


def test_the_job_script_of_the_package_is_that_in_launch():
    assert (ROOT / "launch/slurm.sh").resolve() == ROOT / "diffmegatron/operations/slurm.sh"
