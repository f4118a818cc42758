"""One Slurm for all tests here, and jobs on it whose ranks are stand-ins."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.cluster import Cluster, missing

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes; skips with the reason where Slurm is not installed."""
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with Cluster(folder) as running:
            commands = folder / "bin"
            commands.mkdir()
            stand_in(commands / "diffmegatron")
            running.environment["PATH"] = f"{commands}:{running.environment['PATH']}"
            running.environment["PYTHONPATH"] = str(ROOT)
            yield running
    finally:
        shutil.rmtree(folder)


def stand_in(path: Path) -> None:
    """The command line, but that ``train`` is ``tests/launch/rank.py``, which imports nothing."""
    path.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = train ] && exec {sys.executable} -S {ROOT}/tests/launch/rank.py "$@"\n'
        f'exec {sys.executable} -m diffmegatron "$@"\n'
    )
    path.chmod(0o755)
