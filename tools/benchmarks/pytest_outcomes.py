"""Plugin of pytest that records each test's outcome at once, so that a killed pytest leaves them.

``pytest -p tools.benchmarks.pytest_outcomes --outcomes FILE`` appends a JSON object per line to
FILE: first ``{"collected": COUNT}``, then for each test ``name``, ``outcome`` ("passed", "failed"
or "skipped") and ``values``, the test's ``record_property`` values.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--outcomes``."""
    parser.addoption("--outcomes", type=Path, help="file to which outcomes are appended")


def pytest_configure(config: pytest.Config) -> None:
    """Record outcomes in the process that started pytest, not in the workers of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes(config.getoption("--outcomes")))


class _Outcomes:
    def __init__(self, path: Path) -> None:
        self._path, self._is_counted = path, False

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._count(len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._count(len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # The phases "setup" and "teardown" of a test are recorded only if they fail or skip.
        if report.when == "call" or not report.passed:
            values = dict(report.user_properties)
            self._append({"name": report.nodeid, "outcome": report.outcome, "values": values})

    def _count(self, tests: int) -> None:
        if tests and not self._is_counted:
            self._is_counted = True
            self._append({"collected": tests})

    def _append(self, row: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
