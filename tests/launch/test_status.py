"""``diffmegatron status``: what it says and exits with, while a job runs, waits and is over."""

import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.attempts.ledger import MAX_FAULTS
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.cli import app
from diffmegatron.config.load import dump_recipe
from diffmegatron.errors import UserError
from diffmegatron.operations.status import examine, print_status
from tests.launch.conftest import checkpoint


def metrics(run_dir: Path, times: dict[int, float]) -> None:
    """A line for each step, and a line of another kind between them."""
    with (run_dir / "metrics.jsonl").open("a") as stream:
        for step, when in times.items():
            entry = {"train/loss": 9.0 - step / 10, "perf/tokens_per_second": 1000.0 * step}
            for values in (entry, {"ckpt/failed": 0}):
                stream.write(json.dumps({"step": step, "time": when, **values}) + "\n")


def text(run_dir: Path, capsys) -> str:
    print_status(examine(run_dir), Console(width=200))
    return capsys.readouterr().out


def test_no_attempt(tmp_path):
    with pytest.raises(UserError, match=r"has no recipe\.yaml; give the run_dir"):
        examine(tmp_path)


def test_a_run_that_no_launcher_has_started(tmp_path, tiny_recipe, capsys):
    recipe = tiny_recipe(f"run_dir={tmp_path}/plain")
    run_dir = tmp_path / "plain"
    run_dir.mkdir()
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe))
    metrics(run_dir, {1: 100, 2: 102, 3: 104})
    checkpoint(run_dir, 2)
    found = examine(run_dir)
    assert (found.step, found.steps, found.exit_status) == (3, 20, 1)
    assert found.seconds_left == pytest.approx(34)
    said = text(run_dir, capsys)
    assert "unfinished: last recorded " in said and "step            3 of 20" in said
    assert "no ledger of attempts, as no launcher has started it" in said
    checkpoint(run_dir, 20)
    assert (examine(run_dir).state, examine(run_dir).exit_status) == ("finished", 0)


def test_stages_that_no_launcher_has_started_are_told_by_the_last_begun(tmp_path, tiny_recipe):
    """By what started with what, not by name."""
    starts = {"b_first": (), "a_second": (f"checkpoint.start_from={tmp_path}/b_first",)}
    for name, start in starts.items():
        (tmp_path / name).mkdir()
        recipe = tiny_recipe(f"run_dir={tmp_path}/{name}", *start)
        (tmp_path / name / "recipe.yaml").write_text(dump_recipe(recipe))
    checkpoint(tmp_path / "b_first", 20)
    assert (examine(tmp_path).state, examine(tmp_path).exit_status) == (
        "stage a_second unfinished",
        1,
    )
    checkpoint(tmp_path / "a_second", 20)
    assert examine(tmp_path).state == "stage a_second finished"


def test_a_job_that_starts_runs_and_hangs(attempt, ledger, monkeypatch):
    attempt(None)
    now, passed = time.time(), [0.0]
    monkeypatch.setattr(time, "time", lambda: now + passed[0])
    said = []
    for passed[0] in (3599.0, 3601.0):
        found = examine(ledger.run_dir)
        said.append((found.exit_status, found.state))
    record = RankRecord(ledger.folder(1))
    record.at(5, str(ledger.run_dir))
    for passed[0] in (3601.0 + 599.0, 3601.0 + 601.0):
        found = examine(ledger.run_dir)
        said.append((found.exit_status, found.state))
    assert said == [
        (0, "attempt 1 starts: last heard of 0:59:59 ago"),
        (1, "attempt 1 has disappeared or hangs: last heard of 1:00:01 ago"),
        (0, "attempt 1 runs: last heard of 0:09:59 ago"),
        (1, "attempt 1 has disappeared or hangs: last heard of 0:10:01 ago"),
    ]


@pytest.mark.parametrize(
    ("statuses", "exit_status", "state"),
    [
        ([0], 0, "finished with attempt 1"),
        ([1, 2], 2, "ended by a mistake in attempt 2: rank 0 on "),
        ([75], 1, "waits for the attempt after 1, stopped: so"),
        ([1], 1, "waits for the attempt after 1, fault: rank 0 on "),
        ([1] * MAX_FAULTS, 2, "ended by 10 faults in a row in attempt 10: rank 0 on "),
    ],
)
def test_a_job_whose_attempt_has_ended(statuses, exit_status, state, attempt, ledger):
    for status in statuses:
        attempt(status)
    found = examine(ledger.run_dir)
    assert found.state.startswith(state)
    assert found.exit_status == exit_status


def test_progress_speed_loss_and_checkpoint(attempt, ledger, capsys):
    attempt(1, save=3)
    begun = attempt(None)
    RankRecord(ledger.folder(begun.number)).at(8, str(ledger.run_dir))
    # Two seconds a step, and a requeue of two minutes between steps 3 and 4.
    metrics(ledger.run_dir, {1: 100, 2: 102, 3: 104, 4: 224, 5: 226, 6: 228, 7: 230, 8: 232})
    found = examine(ledger.run_dir)
    assert (found.step, found.steps, found.seconds_left) == (8, 20, pytest.approx(24))
    said = text(ledger.run_dir, capsys)
    for line in (
        "step            8 of 20 (40.0%)",
        "left            0:00:24 of running",
        "tokens/s        8,000",
        "loss            8.2000",
        "held-out loss   none yet",
        f"checkpoint      {CheckpointStore(ledger.run_dir).path(3)}",
        "faults in a row 1 of 10",
    ):
        assert f"  {line}\n" in said
    assert "fault" in said and "not ended" in said


def test_a_job_of_which_nothing_is_known_yet(attempt, ledger, capsys):
    attempt(None)
    said = text(ledger.run_dir, capsys)
    assert "step            none yet" in said and "left            not known" in said


def test_blamed_hosts(attempt, ledger, capsys):
    for _ in range(2):
        begun = attempt(None)
        ledger.end(begun)  # nobody left an end: nobody is to blame
        begun = attempt(None)
        for rank in range(3):
            RankRecord(ledger.folder(begun.number), rank).end(0)
        ledger.end(begun)
    assert examine(ledger.run_dir).suspects == {"n1": 2}
    assert "blamed hosts    n1 (2)" in text(ledger.run_dir, capsys)
    for _ in range(10):
        attempt(75)
    assert examine(ledger.run_dir).suspects == {}


def test_a_slow_host(attempt, ledger, capsys):
    begun = attempt(None)
    record = RankRecord(ledger.folder(begun.number))
    for _ in range(10):
        record.reported((2,))
    record.at(3, str(ledger.run_dir))
    assert "slow hosts      n1\n" in text(ledger.run_dir, capsys)


def test_only_the_end_of_the_metrics_is_read(attempt, ledger):
    attempt(None)
    metrics(ledger.run_dir, {step: 2.0 * step for step in range(1, 3000)})
    assert (ledger.run_dir / "metrics.jsonl").stat().st_size > 1 << 18
    found = examine(ledger.run_dir)
    assert (found.step, found.values["perf/tokens_per_second"]) == (2999, 2999e3)


def test_a_second_stage(ledger, tiny_recipe, capsys):
    from tests.launch.conftest import FACTS

    stages = [tiny_recipe(f"run_dir={ledger.run_dir}/{name}") for name in ("a", "b")]
    ledger.begin(stages, FACTS)
    checkpoint(ledger.run_dir / "a", 20)
    assert examine(ledger.run_dir).run_dir == f"{ledger.run_dir}/a"
    RankRecord(ledger.folder(1)).at(2, f"{ledger.run_dir}/b")
    found = examine(ledger.run_dir)
    assert (found.run_dir, found.step, found.checkpoint) == (f"{ledger.run_dir}/b", 2, None)
    assert "stage           b, 2 of 2\n" in text(ledger.run_dir, capsys)
    with pytest.raises(UserError, match=f"b is a stage of {ledger.run_dir}; give that"):
        examine(ledger.run_dir / "b")


def test_the_command_exits_with_it_and_watches_until_the_end(attempt, ledger, monkeypatch, capsys):
    attempt(75)
    with pytest.raises(SystemExit) as ended:
        app(["status", str(ledger.run_dir)])
    assert ended.value.code == 1
    slept = []
    monkeypatch.setattr(time, "sleep", lambda seconds: slept.append(seconds) or attempt(0))
    with pytest.raises(SystemExit) as ended:
        app(["status", str(ledger.run_dir), "--watch", "7"])
    assert (ended.value.code, slept) == (0, [7.0])
    assert "finished with attempt 2" in capsys.readouterr().out
