"""Tests that a restarted study, and a repeated run of a study, have the same results."""

import json
import os
import signal
import subprocess
import time

from tests import forks
from tests.paths import ROOT

STEPS = 400
RECIPE = """
model:
  num_layers: 1
  hidden_size: 32
  attention: {{head_dim: 8}}
  ffn_hidden_size: 32
  vocab_size: 320
data:
  tokenizer: bytes
  sources: [{{path: {corpus}}}]
  validation_fraction: 0.2
training:
  seq_length: 32
  global_batch_size: 2
  micro_batch_size: 2
  steps: {steps}
  precision: fp32
  log_interval: 1
  eval_interval: 100
  eval_batches: 1
optimizer: {{lr: 1.0e-3}}
checkpoint: {{interval: 20, keep_last: 1}}
"""
STUDY = """
title: Killed
recipe: recipe.yaml
arms: {diff_v1: {model.attention.kind: diff_v1}}
seeds: [1]
baseline: diff_v1
compared: {valid/loss: difference}
"""


def test_a_killed_run_changes_nothing(tmp_path, corpus):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(corpus=corpus, steps=STEPS))
    (tmp_path / "study.yaml").write_text(STUDY)
    assert start(tmp_path, "whole").wait() == 0

    killed = start(tmp_path, "killed")
    checkpoints = tmp_path / "killed" / "study" / "diff_v1-seed1" / "checkpoints"
    while not list(checkpoints.glob("step_????????")):
        assert killed.poll() is None
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    recorded = metrics_of(checkpoints.parent)
    assert 20 <= json.loads(recorded[-1])["step"] < STEPS
    assert not (tmp_path / "killed.out").exists()

    assert start(tmp_path, "killed").wait() == 0
    whole, resumed = (read_line(tmp_path, name) for name in ("whole", "killed"))
    assert resumed == whole
    # The records have wall-clock times, which would differ if the second process repeated steps.
    assert metrics_of(checkpoints.parent)[:20] == recorded[:20]
    log = tmp_path / "killed" / "study" / "logs" / "diff_v1-seed1.log"
    before = log.read_bytes()
    assert start(tmp_path, "killed").wait() == 0
    assert log.read_bytes() == before, "a finished run is skipped"


def test_a_repeated_run_is_compared_with_its_line(tmp_path, corpus):
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(corpus=corpus, steps=20))
    (tmp_path / "study.yaml").write_text(STUDY)
    assert start(tmp_path, "whole").wait() == 0
    results = tmp_path / "whole.out" / "study.jsonl"
    repeated = start(tmp_path, "whole", "--repeat=diff_v1-seed1", stdout=subprocess.PIPE)
    assert b"all values are equal" in repeated.communicate()[0] and repeated.returncode == 0

    line = json.loads(results.read_text())
    line["measures"]["valid/loss"] += 1e-15
    results.write_text(json.dumps(line) + "\n")
    changed = start(tmp_path, "whole", "--repeat=diff_v1-seed1", stderr=subprocess.PIPE)
    (sentence,) = changed.communicate()[1].decode().splitlines()
    assert sentence.startswith("measures, valid/loss is 5.") and changed.returncode == 1
    assert results.read_text() == json.dumps(line) + "\n"
    assert not (tmp_path / "whole" / "study_repeated").exists()

    absent = start(tmp_path, "whole", "--repeat=diff_v1-seed2", stderr=subprocess.PIPE)
    assert b"the finished runs are diff_v1-seed1" in absent.communicate()[1]
    assert absent.returncode == 2


def start(folder, name, *options, stdout=subprocess.DEVNULL, stderr=None):
    """Start the command ``study`` of tools.benchmarks in its own process group."""
    command = [forks.python(), "-m", "tools.benchmarks", "study", folder / "study.yaml"]
    command += [f"--work={folder / name}", f"--out={folder / name}.out", *options]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=stdout, stderr=stderr)


def metrics_of(run_dir):
    """Return the complete lines of the metrics; a killed process may leave a part of a line."""
    return (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]


def read_line(folder, name):
    """Return the only result line of a study, without its value that depends on time."""
    (text,) = (folder / f"{name}.out" / "study.jsonl").read_text().splitlines()
    line = json.loads(text)
    del line["measures"]["tokens per second"]
    return line
