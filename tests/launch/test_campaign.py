"""Tests of the Slurm campaign (``tools/campaigns/slurm.py``): its report, and one of its troubles.

A trouble is a failure or an interruption that the campaign causes during training. A campaign has
many troubles and needs hours, so no test runs a whole campaign.
"""

import json
import random

import pytest
import yaml

from diffmegatron.attempts.ledger import Ledger
from tests.launch.conftest import FOUR, SMALL
from tools.campaigns import slurm as slurm_campaign
from tools.campaigns.slurm_troubles import TROUBLES, ClusterRun, crash


@pytest.fixture
def run(ledger) -> ClusterRun:
    path = ledger.run_dir
    return ClusterRun(None, path, path, path, random.Random(0), print)


@pytest.mark.parametrize(
    ("statuses", "equal", "kept"),
    [((137, 75, 0), True, True), ((137, 75, 0), False, False), ((137, 1, 0), True, False)],
)
def test_the_report_lists_each_attempt_with_its_trouble(
    statuses, equal, kept, run, attempt, monkeypatch
):
    monkeypatch.setattr(slurm_campaign, "same_end", lambda *_: equal)
    for status in statuses:
        attempt(status)
    troubles = [
        {"trouble": "crash", "attempts": [1], "how": "SIGKILL to rank 3"},
        {"trouble": "preempted", "attempts": [2], "how": "preempted"},
    ]
    report = slurm_campaign.reported(run, run, troubles)
    assert report["kept_its_promise"] == kept, "a preempted attempt must not be a fault"
    assert report["by_trouble"] == {"crash": 1, "preemption": 1}
    assert [row["trouble"] for row in report["ledger"]] == ["crash", "preemption", ""]
    rows = slurm_campaign.table(report).splitlines()[2:]
    assert rows[0].startswith("| 1 | 17 | n0, n1 | SIGKILL to rank 3 | fault |  | 0 |")


def test_the_campaign_plans_thirty_troubles_of_all_kinds():
    kinds = {kind for kind, _, _ in TROUBLES.values()}
    assert kinds >= {"time limit", "preemption", "node failure", "crash", "hang", "full disk"}
    assert "recipe mistake" in kinds
    assert sum(times for _, _, times in TROUBLES.values()) >= 30


def test_the_recorded_trouble_matches_the_attempt_in_the_ledger(cluster, corpus, tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 99, "train/loss": 1.0, "time": 9e9}\n')
    waiting = {str(rank): "together | train | wait" for rank in range(4)}
    (run_dir / "script.json").write_text(json.dumps([waiting]))
    (tmp_path / "four.yaml").write_text(FOUR.format(run_dir=run_dir, corpus=corpus))
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(SMALL))
    files = (tmp_path / "four.yaml", tmp_path / "cluster.yaml", run_dir)
    run = ClusterRun(cluster, *files, random.Random(1), print)
    run.launch()
    how = crash(run, run.over())
    slurm_campaign.settled(run)
    slurm_campaign.finish(run)
    first, second = Ledger(run_dir).attempts()
    assert (run.hit, first.cause, second.cause) == ((1,), "fault", "finished")
    signal_name, _, rank = how.partition(" to rank ")
    assert first.reason == f"rank {rank} on {first.host_of(int(rank))}: killed by {signal_name}"
