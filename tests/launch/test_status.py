"""``diffmegatron status``: its output and exit status while a job runs, waits or is over."""

import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from diffmegatron.attempts.ends import End, RankRecord
from diffmegatron.attempts.ledger import MAX_FAULTS, Ledger
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.cli import app
from diffmegatron.config.load import dump_recipe
from diffmegatron.errors import UserError
from diffmegatron.operations.attempt import begin, describe_attempt
from diffmegatron.operations.status import examine_run, print_status
from tests.launch.conftest import FACTS, checkpoint


def metrics(run_dir: Path, times: dict[int, float]) -> None:
    """Append two entries per step to ``metrics.jsonl``, one with loss and speed.

    Args:
        run_dir: folder of the run.
        times: step -> wall-clock time in seconds.
    """
    with (run_dir / "metrics.jsonl").open("a") as stream:
        for step, when in times.items():
            entry = {"train/loss": 9.0 - step / 10, "perf/tokens_per_second": 1000.0 * step}
            for values in (entry, {"ckpt/failed": 0}):
                stream.write(json.dumps({"step": step, "time": when, **values}) + "\n")


def record_held_out_loss(run_dir: Path, step: int) -> None:
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": step, "time": 200, "valid/loss": 1.0}) + "\n")


def text(run_dir: Path, capsys) -> str:
    print_status(examine_run(run_dir), Console(width=200))
    return capsys.readouterr().out


def test_the_status_of_a_folder_without_a_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"has no recipe\.yaml; give the run_dir"):
        examine_run(tmp_path)


def test_the_status_of_a_run_needs_no_launcher(tmp_path, tiny_recipe, capsys):
    recipe = tiny_recipe(f"run_dir={tmp_path}/plain")
    run_dir = tmp_path / "plain"
    run_dir.mkdir()
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe))
    # Three steps take six seconds, in records of one and of two steps.
    metrics(run_dir, {1: 100, 2: 104, 4: 106})
    checkpoint(run_dir, 2)
    found = examine_run(run_dir)
    assert (found.step, found.steps, found.exit_status) == (4, 20, 1)
    assert found.seconds_left == pytest.approx(16 * 6 / 3)
    said = text(run_dir, capsys)
    assert "unfinished: last recorded " in said and "step            4 of 20" in said
    assert "no ledger of attempts, because no launcher started the run" in said
    checkpoint(run_dir, 20)
    found = examine_run(run_dir)
    assert found.state.startswith(
        "unfinished, because valid/loss of the last step are not recorded: "
    )
    record_held_out_loss(run_dir, 20)
    assert (examine_run(run_dir).state, examine_run(run_dir).exit_status) == ("finished", 0)
    assert "left " not in text(run_dir, capsys)


def test_the_last_begun_stage_is_shown_without_a_launcher(tmp_path, tiny_recipe):
    """Check that ``checkpoint.start_from`` orders the stages, not their names."""
    starts = {"b_first": (), "a_second": (f"checkpoint.start_from={tmp_path}/b_first",)}
    for name, start in starts.items():
        (tmp_path / name).mkdir()
        recipe = tiny_recipe(f"run_dir={tmp_path}/{name}", *start)
        (tmp_path / name / "recipe.yaml").write_text(dump_recipe(recipe))
    checkpoint(tmp_path / "b_first", 20)
    assert (examine_run(tmp_path).state, examine_run(tmp_path).exit_status) == (
        "stage a_second unfinished",
        1,
    )
    checkpoint(tmp_path / "a_second", 20)
    record_held_out_loss(tmp_path / "a_second", 20)
    assert examine_run(tmp_path).state == "stage a_second finished"


def test_an_attempt_without_recent_heartbeats_is_reported_as_hanging(attempt, ledger, monkeypatch):
    attempt(None)
    now, passed = time.time(), [0.0]
    monkeypatch.setattr(time, "time", lambda: now + passed[0])
    said = []
    for passed[0] in (3599.0, 3601.0):
        found = examine_run(ledger.run_dir)
        said.append((found.exit_status, found.state))
    record = RankRecord(ledger.folder(1))
    for step, began in ((5, 3601.0), (6, 5000.0)):
        passed[0] = began
        record.set_step(step, str(ledger.run_dir))
        for passed[0] in (began + 599.0, began + 601.0):
            found = examine_run(ledger.run_dir)
            said.append((found.exit_status, found.state))
    assert said == [
        (0, "attempt 1 starts: last heartbeat 0:59:59 ago"),
        (1, "attempt 1 has disappeared or hangs: last heartbeat 1:00:01 ago"),
        (
            0,
            "attempt 1 runs the first step after step 5, which can compile kernels: "
            "last heartbeat 0:09:59 ago",
        ),
        (1, "attempt 1 has disappeared or hangs: last heartbeat 0:10:01 ago"),
        (0, "attempt 1 runs: last heartbeat 0:09:59 ago"),
        (1, "attempt 1 has disappeared or hangs: last heartbeat 0:10:01 ago"),
    ]


def test_a_starting_attempt_is_past_its_preflight_checks_if_their_report_exists(
    ledger, tiny_recipe
):
    ledger.begin([tiny_recipe()], FACTS)
    assert examine_run(ledger.run_dir).state.startswith("attempt 1 starts: ")
    (ledger.folder(1) / "preflight.json").write_text("[]")
    state = examine_run(ledger.run_dir).state
    assert state.startswith("attempt 1 builds or loads the network: ")


@pytest.mark.parametrize(
    ("statuses", "exit_status", "state"),
    [
        ([0], 0, "finished with attempt 1"),
        ([1, 2], 2, "ended by a mistake in attempt 2: rank 0 on "),
        ([75], 1, "waits for attempt 2; attempt 1 ended (stopped): so"),
        ([1], 1, "waits for attempt 2; attempt 1 ended (fault): rank 0 on "),
        ([1] * MAX_FAULTS, 2, "ended by 10 faults in a row in attempt 10: rank 0 on "),
    ],
)
def test_the_state_of_a_job_follows_from_its_ended_attempts(
    statuses, exit_status, state, attempt, ledger
):
    for status in statuses:
        attempt(status)
    found = examine_run(ledger.run_dir)
    assert found.state.startswith(state)
    assert found.exit_status == exit_status


@pytest.fixture
def starts(ledger, tiny_recipe, tmp_path, monkeypatch):
    """Return a function that begins an attempt of job 18 on four ranks, given a recipe's text."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_ID", "18")

    def start(recipe: str, run_dir: Path | None = ledger.run_dir) -> None:
        (tmp_path / "edited.yaml").write_text(recipe)
        begin(tmp_path / "edited.yaml", [], ["localhost"], run_dir)

    return start


BROKEN = "model: [\n"


def test_a_mistake_before_any_rank_is_started_ends_the_job(attempt, ledger, starts, capsys):
    attempt(75, save=3)
    attempt(None)
    with pytest.raises(UserError, match=r"edited\.yaml"):
        starts(BROKEN)
    found = examine_run(ledger.run_dir)
    assert (
        found.state.startswith("ended by a mistake in attempt 3: ") and "edited.yaml" in found.state
    )
    assert (found.exit_status, found.is_over, found.steps) == (2, True, 20)
    assert [each.cause for each in found.attempts] == ["stopped", "lost", "mistake"]
    assert (found.attempts[-1].facts.job, found.attempts[-1].saved) == ("18", 3)
    assert "mistake" in text(ledger.run_dir, capsys)


def test_a_mistake_at_the_first_start_of_a_job_is_recorded(ledger, starts, capsys):
    with pytest.raises(UserError):
        starts(BROKEN)
    found = examine_run(ledger.run_dir)
    assert (found.exit_status, found.steps, found.run_dir) == (2, None, str(ledger.run_dir))
    assert "step            none yet" in text(ledger.run_dir, capsys)


def test_a_mistake_in_a_readable_recipe_is_recorded_in_its_ledger(ledger, starts, tmp_path):
    recipe = (tmp_path / "tiny.yaml").read_text()
    with pytest.raises(UserError, match="global_batch_size"):
        starts(recipe.replace("global_batch_size: 8", "global_batch_size: 6"), None)
    assert examine_run(ledger.run_dir).exit_status == 2
    with pytest.raises(UserError):
        starts(BROKEN, None)  # without a run_dir, the ledger cannot be found
    assert len(ledger.attempts()) == 1


def test_a_queued_job_is_reported_as_waiting(attempt, ledger, capsys):
    ledger.run_dir.mkdir()
    (ledger.run_dir / "job_number").write_text("17\n")
    found = examine_run(ledger.run_dir)
    waits = "job {} has not started: it waits in the queue or was cancelled there"
    assert (found.state, found.exit_status, found.is_over) == (waits.format(17), 1, False)
    said = text(ledger.run_dir, capsys)
    assert "step            none yet" in said and "no launcher" not in said
    attempt(2)  # The attempt belongs to job 17.
    assert examine_run(ledger.run_dir).exit_status == 2
    (ledger.run_dir / "job_number").write_text("19\n")
    found = examine_run(ledger.run_dir)
    assert found.state.startswith(f"{waits.format(19)}; before it: ended by a mistake in attempt 1")
    assert (found.exit_status, found.is_over) == (1, False)


def test_the_status_of_a_chain_shows_its_first_unfinished_stage(tmp_path, tiny_recipe):
    """Check that ``checkpoint.start_from`` orders the stages, not their names."""
    chain, names = tmp_path / "run", ("z_first", "second", "a_third")
    ledgers, begun = {}, {}
    for number, name in enumerate(names):
        start = [f"checkpoint.start_from={chain / names[number - 1]}"] if number else []
        recipe = tiny_recipe(f"run_dir={chain / name}", *start)
        (chain / name).mkdir(parents=True)
        (chain / name / "job.yaml").write_text(dump_recipe(recipe))
        (chain / name / "job_number").write_text(f"{20 + number}\n")
        ledgers[name] = Ledger(chain / name)
        begun[name] = (recipe, FACTS.model_copy(update={"job": f"{20 + number}"}))

    def end(name: str, status: int) -> None:
        ledger, (recipe, facts) = ledgers[name], begun[name]
        attempt = ledger.begin([recipe], facts)
        for rank in range(4):
            RankRecord(ledger.folder(attempt.number), rank).end(status, "so")
        ledger.end(attempt)

    def told() -> tuple[str, int, bool]:
        found = examine_run(chain)
        return found.state, found.exit_status, found.is_over

    assert told()[0].startswith("stage z_first, 1 of 3: job 20 has not started")
    assert told()[1:] == (1, False)
    end("z_first", 0)
    assert told()[0].startswith("stage second, 2 of 3: job 21 has not started")
    end("second", 2)
    assert told()[0].startswith("stage second, 2 of 3: ended by a mistake in attempt 1")
    assert told()[1:] == (2, True)
    end("second", 0)
    end("a_third", 0)
    assert told() == ("stage a_third, 3 of 3: finished with attempt 1", 0, True)


def test_the_status_shows_progress_speed_loss_and_checkpoint(attempt, ledger, capsys):
    attempt(1, save=3)
    begun = attempt(None)
    RankRecord(ledger.folder(begun.number)).set_step(8, str(ledger.run_dir))
    # A step needs two seconds. Between steps 3 and 4, a requeue delays the run by two minutes.
    metrics(ledger.run_dir, {1: 100, 2: 102, 3: 104, 4: 224, 5: 226, 6: 228, 7: 230, 8: 232})
    found = examine_run(ledger.run_dir)
    assert (found.step, found.steps, found.seconds_left) == (8, 20, pytest.approx(24))
    said = text(ledger.run_dir, capsys)
    for line in (
        "step            8 of 20 (40.0%)",
        "left            0:00:24 of training",
        "tokens/s        8,000",
        "loss            8.2000",
        "held-out loss   none yet",
        f"checkpoint      {CheckpointStore(ledger.run_dir).path(3)}",
        "faults in a row 1 of 10",
    ):
        assert f"  {line}\n" in said
    assert "fault" in said and "not ended" in said


def test_no_reason_is_wrapped_on_a_narrow_terminal(attempt, ledger, capsys):
    begun = attempt(None)
    reason = "RuntimeError: " + "the cable of the network adapter is loose, " * 4 + "twice"
    RankRecord(ledger.folder(begun.number), 0).end(1, reason)
    ended = ledger.end(begun)
    print_status(examine_run(ledger.run_dir), Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert reason in ended.reason and f"           why: {ended.reason}" in lines


def test_control_characters_in_a_reason_are_escaped(attempt, ledger, capsys):
    begun = attempt(None)
    end = End(status=1, reason="a\n\x1b[2Jattempt 2: finished", host="n0\n")
    (ledger.folder(begun.number) / "rank_00000.json").write_text(end.model_dump_json())
    described = describe_attempt(ledger.end(begun))
    said = text(ledger.run_dir, capsys)
    for shown in (said, described):
        assert "\x1b" not in shown and "\nattempt 2" not in shown
        assert "a\\n\\x1b[2Jattempt 2: finished" in shown


def test_the_status_names_the_squeue_command_of_an_unfinished_job(attempt, ledger, capsys):
    attempt(75)
    line = "  job             {0}; squeue --jobs={0} shows it until it ends\n"
    assert line.format(17) in text(ledger.run_dir, capsys)
    (ledger.run_dir / "job_number").write_text("19\n")
    assert line.format(19) in text(ledger.run_dir, capsys)
    (ledger.run_dir / "job_number").unlink()
    attempt(0)
    assert "squeue" not in text(ledger.run_dir, capsys)


def test_a_job_without_metrics_has_no_step_and_unknown_time_left(attempt, ledger, capsys):
    attempt(None)
    said = text(ledger.run_dir, capsys)
    assert "step            none yet" in said and "left            unknown" in said


def test_the_status_shows_blamed_hosts(attempt, ledger, capsys):
    for _ in range(2):
        begun = attempt(None)
        ledger.end(begun)  # no rank has recorded an end, so no host is blamed
        begun = attempt(None)
        for rank in range(3):
            RankRecord(ledger.folder(begun.number), rank).end(0)
        ledger.end(begun)
    assert examine_run(ledger.run_dir).suspects == {"n1": 2}
    assert "blamed hosts    n1 (2)" in text(ledger.run_dir, capsys)
    for _ in range(10):
        attempt(75)
    assert examine_run(ledger.run_dir).suspects == {}


def test_the_status_shows_slow_hosts(attempt, ledger, capsys):
    begun = attempt(None)
    record = RankRecord(ledger.folder(begun.number))
    for _ in range(10):
        record.add_report((2,))
    record.set_step(3, str(ledger.run_dir))
    assert "slow hosts      n1\n" in text(ledger.run_dir, capsys)


def test_the_last_values_of_large_metrics_are_found(attempt, ledger):
    attempt(None)
    metrics(ledger.run_dir, {step: 2.0 * step for step in range(1, 3000)})
    assert (ledger.run_dir / "metrics.jsonl").stat().st_size > 1 << 18
    found = examine_run(ledger.run_dir)
    assert (found.step, found.values["perf/tokens_per_second"]) == (2999, 2999e3)


def test_the_status_shows_the_stage_in_progress(ledger, tiny_recipe, capsys):
    stages = [tiny_recipe(f"run_dir={ledger.run_dir}/{name}") for name in ("a", "b")]
    ledger.begin(stages, FACTS)
    checkpoint(ledger.run_dir / "a", 20)
    assert examine_run(ledger.run_dir).run_dir == f"{ledger.run_dir}/a"
    RankRecord(ledger.folder(1)).set_step(2, f"{ledger.run_dir}/b")
    found = examine_run(ledger.run_dir)
    assert (found.run_dir, found.step, found.checkpoint) == (f"{ledger.run_dir}/b", 2, None)
    assert "stage           b, 2 of 2\n" in text(ledger.run_dir, capsys)
    with pytest.raises(UserError, match=f"b is a stage of {ledger.run_dir}; give that folder"):
        examine_run(ledger.run_dir / "b")


def test_the_command_returns_the_exit_status_and_watches_until_the_end(
    attempt, ledger, monkeypatch, capsys
):
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
