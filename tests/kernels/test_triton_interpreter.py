"""Test that runs tests/kernels/interpreted in a separate process with Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    folder = Path(__file__).parent / "interpreted"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"\n{run.stdout[-6000:]}\n{run.stderr[-2000:]}"
    print(run.stdout[-500:])
