"""Tests of ``launch/prepare.sh`` on a real Slurm: an array with a requeued part, and the merge."""

import json
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


def test_a_call_without_parts_is_refused(tmp_path):
    for arguments in (["corpora/web", "raw/web", "more"], ["64", "corpora/web"]):
        result = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr == "usage: launch/prepare.sh PARTS PREFIX INPUT... [OPTION...]\n"
