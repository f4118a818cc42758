"""Test of a short campaign of ``tools.campaigns.faults``, which disturbs a run under torchrun.

One fault is a SIGKILL to a rank. The other fault is a SIGSTOP to a rank, after which the run hangs
until the watchdog ends it.
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
    assert report["stacks_written"], "the rank that waited for the stopped rank must write stacks"
