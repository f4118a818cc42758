"""The campaign of faults under torchrun in its short form; ``tools.campaigns.faults`` is the long.

One rank is killed and one is stopped, which only the watchdog can end.
"""

import json
import subprocess
import sys

from tests.paths import ROOT


def test_killed_and_stopped_ranks_leave_no_trace(tmp_path):
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
