"""The measuring tools run, on sizes that measure nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parent.parent.parent / "tools"


def run(tool: str, *arguments: object) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", TOOLS / tool, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_bench_checkpoint(tmp_path):
    out = tmp_path / "report.json"
    sizes = ("--layers", 1, "--hidden", 64, "--repeats", 1)
    run("bench_checkpoint.py", "--scratch", tmp_path / "scratch", "--out", out, *sizes)
    report = json.loads(out.read_text())
    assert report["checkpoint_bytes"] > 12 * report["parameters"]
    assert not (tmp_path / "scratch").exists()
