"""JSON file of a benchmark's report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as indented JSON, and create its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
