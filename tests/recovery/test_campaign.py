"""A short run of ``tools.campaigns.faults``, which injects faults into a run under torchrun.

One rank gets SIGKILL, and one gets SIGSTOP, so that the run hangs until the watchdog ends it.
"""

import json
import subprocess
import sys

from tests.paths import ROOT


def test_killed_and_stopped_ranks_do_not_change_the_final_state(tmp_path):
    command = [sys.executable, "-m", "tools.campaigns.faults", "--kills=1", "--stops=1"]
    command += ["--steps=120", "--step-seconds=10", f"--out={tmp_path / 'report.json'}"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1700
    )
    assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == 2
    assert report["final_state_equal_to_the_bit"]
    assert report["listed_checkpoints_that_failed"] == []
    assert report["stacks_written"], "the rank that waited for the stopped one"
