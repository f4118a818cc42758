"""Run pytest; write its CPU seconds to docs/results/tests.json and docs/design/tests.md.

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
from tests.costs.summary import Summary, summarize, tables
from tests.paths import DOCS, RESULTS

PAGE = DOCS / "design/tests.md"
BEFORE, AFTER = RESULTS / "tests_before.json", RESULTS / "tests.json"
BEGIN, END = "<!-- costs -->", "<!-- end of costs -->"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        records, began = Path(folder) / "records", time.monotonic()
        status = run(records, sys.argv[1:])
        summary = {"wall_seconds": round(time.monotonic() - began)} | summarize(records)
    if status == 0:
        AFTER.write_text(json.dumps(summary, indent=1) + "\n")
        write_page(json.loads(BEFORE.read_text()), summary)
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


def write_page(before: Summary, after: Summary) -> None:
    """Write the tables into the page."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    PAGE.write_text(f"{head}{BEGIN}\n{tables(before, after)}\n{END}{tail}")


if __name__ == "__main__":
    sys.exit(main())
