"""Fixtures of the launch tests: a ledger of attempts, and a Slurm cluster that runs rank.py."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.attempts.ledger import Facts, Ledger
from diffmegatron.checkpoint.checkpoint_manifest import CheckpointManifest, write_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from tests import forks
from tests.conftest import TINY
from tests.paths import ROOT
from tools.campaigns.slurm_cluster import Cluster, missing

# A recipe with one microbatch per step for each of four data-parallel ranks.
FOUR = TINY.replace("micro_batch_size: 4", "micro_batch_size: 2")
# Settings of a cluster whose nodes have no GPU and two ranks each.
SMALL = {"gpus_per_node": 0, "ranks_per_node": 2, "cpus_per_rank": 1, "time_limit": "30"}
FACTS = Facts(job="17", nodes=("n0", "n1"), ranks=4, versions={}, commit=None)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Start a Slurm cluster of three nodes; skip the test if Slurm is not installed."""
    if reason := missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with Cluster(folder, nodes=3) as running:
            commands = folder / "bin"
            commands.mkdir()
            stand_in(commands / "diffmegatron")
            running.environment["PATH"] = f"{commands}:{running.environment['PATH']}"
            running.environment["PYTHONPATH"] = str(ROOT)
            yield running
    finally:
        shutil.rmtree(folder)


def stand_in(path: Path) -> None:
    """Write a ``diffmegatron`` command that runs ``tests/launch/rank.py`` if ``RANK`` is set.

    Otherwise it runs the real command line in a fork.
    """
    path.write_text(
        "#!/bin/sh\n"
        f'[ -n "$RANK" ] && exec {sys.executable} -S {ROOT}/tests/launch/rank.py "$@"\n'
        f'exec {forks.python()} -m diffmegatron "$@"\n'
    )
    path.chmod(0o755)


@pytest.fixture
def ledger(tmp_path) -> Ledger:
    return Ledger(tmp_path / "run")


@pytest.fixture
def attempt(ledger, tiny_recipe):
    """Return a function that begins an attempt (a start of a job) and ends it with a status.

    All four ranks end with this status. If the status is None, the attempt does not end, as if the
    job had been killed. ``save`` is the step of a checkpoint to write; None: no checkpoint.
    """

    def make(status: int | None, save: int | None = None):
        begun = ledger.begin([tiny_recipe()], FACTS)
        if save is not None:
            checkpoint(ledger.run_dir, save)
        if status is None:
            return begun
        for rank in range(4):
            RankRecord(ledger.folder(begun.number), rank).end(status, "so")
        return ledger.end(begun)

    return make


def checkpoint(run_dir: Path, step: int) -> None:
    folder = CheckpointStore(run_dir).path(step)
    folder.mkdir(parents=True)
    write_manifest(folder, CheckpointManifest(step, ()))
