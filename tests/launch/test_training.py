"""Test of a real training run that ``launch`` submits to Slurm and that is stopped and requeued."""

import os
import re

import pytest
import yaml

from diffmegatron.attempts.ledger import Ledger
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.operations.launch import prepare_launch, submit
from diffmegatron.operations.status import examine_run
from diffmegatron.training.monitoring.metrics import read_metrics
from tests import forks
from tests.launch.conftest import FOUR, SMALL
from tests.paths import ROOT

STEPS = 200


@pytest.fixture
def job(cluster, corpus, tmp_path, monkeypatch) -> str:
    """Submit a job on two nodes with two ranks each, and return its job number."""
    command = tmp_path / "bin/diffmegatron"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {forks.python()} -m diffmegatron "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{os.environ['PATH']}"
    setup = [f"export PATH={path}", f"export PYTHONPATH={ROOT}"]
    environment = {"OMP_NUM_THREADS": "1"}
    settings = {"export": "NONE", "setup": setup, "environment": environment}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(SMALL | settings))
    recipe = FOUR.format(run_dir=tmp_path / "run", corpus=corpus).replace("steps: 20", "steps: 200")
    (tmp_path / "tiny.yaml").write_text(recipe)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    overrides = ("checkpoint.interval=1000", "training.eval_batches=0")
    return submit(prepare_launch(tmp_path / "tiny.yaml", overrides, 2, tmp_path / "cluster.yaml"))


def test_a_stopped_training_job_is_requeued_and_finishes(cluster, job, tmp_path):
    run_dir = tmp_path / "run"
    cluster.until("it trains", (run_dir / "metrics.jsonl").exists, 600)
    cluster.call("scancel", "--signal=USR1", job)
    assert cluster.wait(job, 600)["ExitCode"] == "0:0"
    first, second = Ledger(run_dir).attempts()
    assert (first.cause, second.cause) == ("stopped", "finished")
    assert 0 < first.last_step < STEPS
    assert (second.first_step, second.last_step) == (first.last_step, STEPS)
    assert second.checkpoint == str(CheckpointStore(run_dir).path(first.last_step))
    steps = [entry["step"] for entry in read_metrics(run_dir) if "train/loss" in entry]
    assert steps == list(range(1, STEPS + 1))
    assert CheckpointStore(run_dir).latest() == CheckpointStore(run_dir).path(STEPS)
    found = examine_run(run_dir)
    assert (found.exit_status, found.step) == (0, STEPS)
    # The attempt's ranks.log has the output of all ranks. The job's log has only rank 0's output.
    said = (run_dir / "attempts/0001/ranks.log").read_text()
    assert re.search("^0: SIGUSR1: stopping after this step", said, re.MULTILINE)
    log = (run_dir / f"job_{job}.log").read_text()
    assert f"stop requested: saved step {first.last_step}" in log
    assert not re.search("^[1-3]: ", log, re.MULTILINE)
