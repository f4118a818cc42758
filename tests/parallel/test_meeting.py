"""Tests that ranks form a process group although another program tries to take their port."""

import os
import subprocess
import sys

from tests.paths import ROOT
from tests.ranks import launch


def test_ranks_of_tests_meet():
    assert launch(2, "tests.parallel.port_thief", [], [], timeout=600) == "2 ranks met\n" * 2


def test_ranks_of_torchrun_sh_meet(tmp_path):
    command = tmp_path / "diffmegatron"
    command.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = train ] && exec {sys.executable} -m tests.parallel.port_thief\n'
        f'exec {sys.executable} -m diffmegatron "$@"\n'
    )
    command.chmod(0o755)
    result = subprocess.run(
        [ROOT / "launch/torchrun.sh", "recipe.yaml"],
        env=os.environ
        | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RANKS": "2",
            "RESTARTS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.stdout == "2 ranks met\n", result.stderr[-3000:]
    assert result.returncode == 0
