"""Tests of ``launch/prepare.sh`` on a real Slurm: an array with a requeued part, and the merge."""

import json
import os
import subprocess

from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from diffmegatron.data.prepare.prepare import prepare
from tests import forks
from tests.paths import ROOT

SCRIPT = ROOT / "launch/prepare.sh"
# This command once sends USR1 to the job of part 2, as Slurm does before the time limit.
COMMAND = """#!/bin/bash
case "$*" in *"--part 2/2"*)
  if mkdir {folder}/limit; then
    scancel --batch --signal=USR1 "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
    exec sleep 100
  fi
esac
exec {python} -m diffmegatron "$@"
"""


def test_a_slurm_array_with_a_requeued_part_is_merged_completely(cluster, tmp_path):
    texts = [{"text": "word " * number} for number in range(60)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(text) + "\n" for text in texts))
    command = tmp_path / "bin/diffmegatron"
    command.parent.mkdir()
    command.write_text(COMMAND.format(folder=tmp_path, python=forks.python()))
    command.chmod(0o755)
    paths = {"PATH": f"{command.parent}:{cluster.environment['PATH']}"}
    result = subprocess.run(
        [SCRIPT, "2", tmp_path / "out", source, "--tokenizer", "bytes", "--workers", "1"],
        env=cluster.environment | paths,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    said = cluster.wait(result.stdout.strip())
    logs = "\n".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert said["JobState"] == "COMPLETED", logs
    assert (tmp_path / "limit").exists()
    whole = prepare([source], tmp_path / "whole", "bytes", show_progress=False)
    assert read_corpus_manifest(tmp_path / "out").content == whole.content


def test_a_time_limit_at_which_a_part_would_be_requeued_forever_is_refused(tmp_path):
    times = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1060"}
    result = subprocess.run(
        [SCRIPT, "2", tmp_path / "out", tmp_path / "in.jsonl"],
        env=os.environ | times | {"SLURM_ARRAY_TASK_ID": "1", "SLURM_CPUS_PER_TASK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: a time limit of 60 s leaves no time before the requeue")
    assert not list(tmp_path.iterdir())


def test_a_call_without_parts_is_refused(tmp_path):
    for arguments in (["corpora/web", "raw/web", "more"], ["64", "corpora/web"]):
        result = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr == "usage: launch/prepare.sh PARTS PREFIX INPUT... [OPTION...]\n"
