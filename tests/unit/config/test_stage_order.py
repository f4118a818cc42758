"""Stages cannot have the names of files and folders that a run writes into its ``run_dir``.

The folders of stages are also in ``run_dir``.
"""

import pytest

from diffmegatron.attempts.ledger import ATTEMPTS
from diffmegatron.checkpoint.checkpoint_store import CHECKPOINTS, RECIPE
from diffmegatron.config.stage_order import RESERVED, is_stage_name
from diffmegatron.operations.launch import JOB_FILE, JOB_NUMBER, JOB_RECIPE
from diffmegatron.operations.torchrun import SCRIPT
from diffmegatron.training.builtin_hooks import PROFILE
from diffmegatron.training.guard_hook import EVENTS
from diffmegatron.training.monitoring.metrics import METRICS, TENSORBOARD
from diffmegatron.training.monitoring.wandb_writer import RUN_ID
from diffmegatron.training.safeguards import LOCK, STACKS, STOPPED_AT

WRITTEN = {ATTEMPTS, CHECKPOINTS, EVENTS, JOB_FILE, JOB_NUMBER, JOB_RECIPE, LOCK, METRICS}
WRITTEN |= {PROFILE, RECIPE, RUN_ID, SCRIPT, STACKS, STOPPED_AT, TENSORBOARD}


def test_file_names_of_a_run_are_reserved():
    assert WRITTEN == RESERVED
    assert not any(is_stage_name(name) for name in RESERVED)


@pytest.mark.parametrize(
    "name", ["job_17.log", "preflight_00003", "metrics.jsonl.repaired", "recipe.yaml.tmp"]
)
def test_numbered_and_unfinished_file_names_are_reserved(name):
    assert not is_stage_name(name)


@pytest.mark.parametrize("name", ["long", "job", "recipe", "lock2", "profile_64k", "job_17"])
def test_other_names_are_free(name):
    assert is_stage_name(name)
