"""Tests of launch/torchrun.sh, started directly and by ``diffmegatron launch --torchrun``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.training.monitoring.metrics import read_metrics
from tests import forks
from tests.paths import ROOT


def a_signal_to_the_script(script: subprocess.Popen) -> None:
    script.send_signal(signal.SIGTERM)


def ctrl_c_and_close_the_terminal(script: subprocess.Popen) -> None:
    """Send SIGINT and then SIGHUP to the script and torchrun, as a terminal does."""
    os.killpg(script.pid, signal.SIGINT)
    time.sleep(0.3)  # torchrun has received the first signal and waits for the ranks.
    os.killpg(script.pid, signal.SIGHUP)


SCRIPT = [str(ROOT / "launch/torchrun.sh")]
LAUNCH = [sys.executable, "-m", "diffmegatron", "launch", "--torchrun", "--nodes=1"]
CLUSTER = "{gpus_per_node: 0, ranks_per_node: 2, time_limit: '30'}"


@pytest.mark.parametrize(
    ("command", "stop"),
    [
        ([*LAUNCH, "--cluster=cluster.yaml"], a_signal_to_the_script),
        (SCRIPT, ctrl_c_and_close_the_terminal),
    ],
)
def test_the_script_saves_and_exits_with_75_after_a_stop_signal(
    command, stop, tiny_recipe, tmp_path
):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    commands = Path(sys.executable).parent
    if command is SCRIPT:  # The other launch runs the commands of a user.
        commands = tmp_path
        (commands / "diffmegatron").write_text(
            f'#!/bin/sh\nexec {forks.python()} -m diffmegatron "$@"\n'
        )
        (commands / "diffmegatron").chmod(0o755)
    recipe = tiny_recipe("training.steps=100000", "training.eval_batches=0")
    run_dir = Path(recipe.run_dir)
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "RANKS": "2",
    }
    command = [*command, str(tmp_path / "tiny.yaml")]
    command += ["training.steps=100000", "training.eval_batches=0", "checkpoint.interval=100000"]
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(
            command,
            env=environment,
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + 600
        while not any("train/loss" in entry for entry in read_metrics(run_dir)):
            assert script.poll() is None and time.monotonic() < deadline, log_of(tmp_path)
            time.sleep(0.2)
        stop(script)
        assert script.wait(timeout=600) == 75, log_of(tmp_path)
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log and log.count("closing signal") == 2
    (step,) = CheckpointStore(run_dir).complete()
    state = json.loads((CheckpointStore(run_dir).path(step) / "state.json").read_text())
    assert state["step"] == max(entry["step"] for entry in read_metrics(run_dir))


def log_of(folder: Path) -> str:
    return (folder / "log").read_text()[-3000:]
