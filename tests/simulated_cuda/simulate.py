"""Run cases in one separate process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.paths import ROOT
from tests.simulated_cuda.library import library
from tests.simulated_cuda.recording import Case, Recording

__all__ = ["Case", "Recording", "SimulationError", "simulate", "try_simulate"]


class SimulationError(AssertionError):
    """Error of a case; the message ends with the traceback or with the output of the process."""


def simulate(
    cases: Sequence[Case],
    timeout: float = 1200,
    environment: Mapping[str, str] | None = None,
) -> list[Recording]:
    """Run cases one after the other, each in a fork of one process that has imported everything.

    Args:
        cases: cases to run.
        timeout: limit for all cases together, in seconds.
        environment: environment variables of the process; None: the variables of this process.

    Raises:
        SimulationError: a case failed, or the process failed.
        UnavailableError: the simulation cannot run on this machine.
        subprocess.TimeoutExpired: the cases took longer than ``timeout``.
    """
    results = try_simulate(cases, timeout, environment)
    for result in results:
        if isinstance(result, SimulationError):
            raise result
    return results  # type: ignore[return-value]


def try_simulate(
    cases: Sequence[Case],
    timeout: float = 1200,
    environment: Mapping[str, str] | None = None,
) -> list[Recording | SimulationError]:
    """Run cases like :func:`simulate`; return an error in the place of each case that failed."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        results.mkdir()
        Path(folder, "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.simulated_cuda.worker", str(library()), folder],
            # Tests that train in this process select the CPU with the variable DS_ACCELERATOR, so
            # _without_cpu() leaves out this variable.
            env=_without_cpu(environment or os.environ) | {"OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return [_result(case, results / str(i), output) for i, case in enumerate(cases)]


def _without_cpu(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != "DS_ACCELERATOR"}


def _result(case: Case, file: Path, output: str) -> Recording | SimulationError:
    if not file.exists():
        return SimulationError(f"{case} ended without a result:\n{output[-4000:]}")
    result = json.loads(file.read_text())
    if "error" in result:
        return SimulationError(f"{case}:\n{result['error']}")
    return Recording.from_plain(result)
