"""Console lines of a run whose output is a full disk or a closed pipe."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os
from diffmegatron.training.monitoring.progress import print_line
for number in range(3):
    print_line(f"line {number} " + "x" * LENGTH)
"""
ROOM_AGAIN = """
os.dup2(2, 1)
print_line("the last line")
"""


@pytest.mark.parametrize("length", [10, 10_000], ids=["in the buffer", "past the buffer"])
@pytest.mark.parametrize(("then", "said"), [("", b""), (ROOM_AGAIN, b"the last line\n")])
def test_a_full_disk_loses_lines_but_does_not_end_the_process(then, said, length):
    script = SCRIPT.replace("LENGTH", str(length)) + then
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert (result.returncode, result.stderr) == (0, said)


def test_a_closed_pipe_does_not_end_the_process():
    script = SCRIPT.replace("LENGTH", "10") + ROOM_AGAIN
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.close()
    assert process.stderr.read() == b"the last line\n"
    assert process.wait() == 0
