"""Run pytest; write its CPU seconds to docs/results/tests.json and docs/results/tests.md.

python -m tests.costs [PYTEST_ARGUMENTS...]
"""

import json
import os
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.costs import plugin
from tests.costs.summary import summarize, tables
from tests.paths import RESULTS

BEFORE, AFTER = RESULTS / "tests_before.json", RESULTS / "tests.json"
PAGE = RESULTS / "tests.md"
INTRODUCTION = """\
# Cost of the tests

`make test-profile` runs all tests and writes this page and `tests.json`. The run "before" (commit
55ca0011, `tests_before.json`) was ended on a busy machine after 3,361 of 5,405 tests; files that it
had not reached are missing. [design/tests.md](../design/tests.md) explains the differences.
"""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        records, began = Path(folder) / "records", time.monotonic()
        status = run(records, sys.argv[1:])
        summary = {"wall_seconds": round(time.monotonic() - began)} | summarize(records)
    if status == 0:
        AFTER.write_text(json.dumps(summary, indent=1) + "\n")
        PAGE.write_text(f"{INTRODUCTION}\n{tables(json.loads(BEFORE.read_text()), summary)}\n")
    return status


def run(records: Path, arguments: list[str]) -> int:
    """Run pytest with the recording of every process and test; return its exit status."""
    hook = Path(site.getsitepackages()[0]) / "diffmegatron_test_costs.pth"
    process = Path(__file__).with_name("process.py")
    values = f"dict(__name__='costs', RECORDS={str(records)!r})"
    hook.write_text(f"import sys; exec(open({str(process)!r}).read(), {values})\n")
    try:
        return subprocess.call(
            [sys.executable, "-m", "pytest", "-p", plugin.__name__, *arguments],
            env=os.environ | {plugin.RECORDS: str(records)},
        )
    finally:
        hook.unlink()


if __name__ == "__main__":
    sys.exit(main())
