"""What the campaign on Slurm reports (``tools/slurm_campaign.py``); it itself takes long."""

import random

import pytest
import slurm_campaign
from slurm_troubles import TROUBLES, Month


@pytest.fixture
def month(ledger) -> Month:
    path = ledger.run_dir
    return Month(None, path, path, path, random.Random(0), print)


@pytest.mark.parametrize(
    ("statuses", "equal", "kept"),
    [((137, 75, 0), True, True), ((137, 75, 0), False, False), ((137, 1, 0), True, False)],
)
def test_each_attempt_stands_beside_the_trouble_that_hit_it(
    statuses, equal, kept, month, attempt, monkeypatch
):
    monkeypatch.setattr(slurm_campaign, "same_end", lambda *_: equal)
    for status in statuses:
        attempt(status)
    troubles = [
        {"trouble": "crash", "attempts": [1], "how": "SIGKILL to rank 3"},
        {"trouble": "preempted", "attempts": [2], "how": "preempted"},
    ]
    report = slurm_campaign.reported(month, month, troubles)
    assert report["kept_its_promise"] == kept, "a preemption is no fault"
    assert report["by_trouble"] == {"crash": 1, "preemption": 1}
    assert [row["trouble"] for row in report["ledger"]] == ["crash", "preemption", ""]
    rows = slurm_campaign.table(report).splitlines()[2:]
    assert rows[0].startswith("| 1 | 17 | n0, n1 | SIGKILL to rank 3 | fault |  | 0 |")


def test_a_month_has_thirty_attempts_that_end_by_every_kind_of_trouble():
    kinds = {kind for kind, _, _ in TROUBLES.values()}
    assert kinds >= {"time limit", "preemption", "node failure", "crash", "hang", "full disk"}
    assert "recipe mistake" in kinds
    assert sum(times for _, _, times in TROUBLES.values()) >= 30
