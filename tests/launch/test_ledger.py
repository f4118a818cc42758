"""Tests of the ledger and of the records of how ranks end.

The ledger records all attempts of a run; an attempt is one start of a job's ranks.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffmegatron.attempts.ends import EXIT_STOPPED, End, RankRecord, read_ends, read_heartbeat
from diffmegatron.attempts.ledger import MAX_FAULTS, bad_hosts
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.errors import UserError
from diffmegatron.operations.attempt import end, exit_status, free_port
from diffmegatron.training.monitoring.stragglers import slow
from tests import forks
from tests.launch.conftest import FACTS, checkpoint


def test_an_attempt_is_written_when_it_begins_and_when_it_ends(ledger, attempt):
    begun = attempt(None)
    assert ledger.attempts() == [begun]
    assert (begun.number, begun.facts, begun.stages) == (1, FACTS, {str(ledger.run_dir): 20})
    for rank in range(4):
        record = RankRecord(ledger.folder(1), rank)
        record.set_step(5, "run")
        record.set_step(6, "run")
        record.end(EXIT_STOPPED, "")
    checkpoint(ledger.run_dir, 6)
    ended, status, _ = end(ledger.folder(1))
    assert (status, ended.cause, ended.saved, ended.faults) == (EXIT_STOPPED, "stopped", 6, 0)
    assert (ended.first_step, ended.last_step) == (5, 6)
    assert ledger.attempts() == [ended]
    assert attempt(0).checkpoint == str(CheckpointStore(ledger.run_dir).path(6))


def test_only_faults_increase_the_fault_count(attempt):
    counted = [attempt(status).faults for status in (1, 137, 75, 1, 143)]
    assert counted == [1, 2, 2, 3, 3]
    attempt(None)  # A job that ends before its ranks is not a fault.
    assert attempt(1).faults == 4


def test_a_new_checkpoint_resets_the_fault_count(attempt):
    counted = [attempt(1, save=save).faults for save in (None, None, 10, None, 5, 20, None)]
    # After a rollback, step 5 is saved. The count stays, because step 10 was saved before.
    assert counted == [1, 2, 1, 2, 3, 1, 2]


def test_a_job_fails_after_the_maximum_number_of_faults(attempt):
    for _ in range(MAX_FAULTS - 1):
        assert exit_status(attempt(1)) == EXIT_STOPPED
    assert exit_status(attempt(75)) == EXIT_STOPPED
    assert exit_status(attempt(1)) == 1


def test_a_fault_in_training_restarts_at_once_unless_a_host_is_bad(ledger, attempt):
    begun = attempt(None)
    record = RankRecord(ledger.folder(1))
    record.set_step(3, "run")
    assert exit_status(ledger.end(begun)) == EXIT_STOPPED, "the run was still at its first step"
    record.set_step(4, "run")
    record.end(1, "so")
    fault = ledger.end(begun)
    assert (fault.cause, exit_status(fault), exit_status(fault, ["n1"])) == ("fault", 69, 75)
    record.end(EXIT_STOPPED)
    assert exit_status(ledger.end(begun)) == EXIT_STOPPED


def test_time_limits_do_not_count_as_faults(attempt):
    assert {exit_status(attempt(75)) for _ in range(MAX_FAULTS + 2)} == {EXIT_STOPPED}


def test_a_job_that_its_end_stops_twice_before_a_new_step_ends(ledger, attempt, monkeypatch):
    monkeypatch.setenv("DIFFMEGATRON_SIGNAL_SECONDS", "600")

    def killed_by_signal() -> tuple[str, int]:
        number = attempt(None).number
        for rank in range(4):
            RankRecord(ledger.folder(number), rank).end(128 + signal.SIGUSR1)
        ended, status, _ = end(ledger.folder(number))
        return ended.cause, status

    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 700))
    assert [killed_by_signal() for _ in range(3)] == 3 * [("stopped", EXIT_STOPPED)]
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 500))
    attempt(0)
    assert [killed_by_signal() for _ in range(2)] == [("stopped", EXIT_STOPPED), ("mistake", 2)]
    assert killed_by_signal() == ("stopped", EXIT_STOPPED), "the user has started the job again"


def test_the_end_of_an_extended_job_is_read_from_its_file(ledger, attempt, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() - 1))
    for end_time, is_over in (("none", False), (str(int(time.time() + 60)), False), ("1", True)):
        causes = []
        for _ in range(2):
            folder = ledger.folder(attempt(None).number)
            for rank in range(4):
                RankRecord(folder, rank).end(128 + signal.SIGUSR1)
            (folder / "job_end").write_text(f"{end_time}\n")
            causes.append(end(folder)[0].cause)
        assert ("mistake" in causes) == is_over


def test_a_job_that_reaches_its_time_limit_twice_before_a_new_step_ends(ledger, attempt):
    def killed_at_the_time_limit() -> None:
        (ledger.folder(attempt(None).number) / "time_limit").touch()

    killed_at_the_time_limit()
    killed_at_the_time_limit()
    with pytest.raises(UserError, match="job 17 has been stopped by its time limit twice before"):
        attempt(None)
    assert [each.cause for each in ledger.attempts()] == ["stopped", "mistake"]
    attempt(None)


def test_unfit_and_repeatedly_blamed_hosts_are_bad(ledger, attempt):
    def ends(*statuses: int) -> list[str]:
        begun = attempt(None)
        for rank, status in enumerate(statuses):
            end = End(status=status, host=FACTS.nodes[rank // 2])
            (ledger.folder(begun.number) / f"rank_{rank:05d}.json").write_text(
                end.model_dump_json()
            )
        ledger.end(begun)
        return bad_hosts(ledger.attempts())

    assert ends(143, 143, 139, 143) == [], "a host that was blamed once is not bad"
    assert ends(75, 75, 75, 75) == []
    assert ends(143, 143, 143, 137) == ["n1"]
    assert ends(71, 143, 143, 143) == ["n0", "n1"], "an unfit host is bad at once"
    assert ends(0, 0, 0, 0) == ["n1"]
    for _ in range(8):
        ends(75, 75, 75, 75)
    assert ends(75, 75, 75, 75) == [], "n1 was not blamed in the last ten attempts"


def test_the_next_attempt_records_the_end_of_a_killed_attempt(ledger, attempt):
    attempt(None)
    RankRecord(ledger.folder(1), 2).end(0)
    attempt(None)
    first, second = ledger.attempts()
    assert (first.cause, first.reason) == (
        "lost",
        "the job ended before ranks 0, 1, 3",
    )
    assert first.ended == pytest.approx(read_ends(ledger.folder(1))[2].time)
    assert second.ended is None


def test_damaged_ledger_files_are_skipped(ledger, attempt, caplog):
    attempt(0)
    attempt(None)
    (ledger.directory / "0001.json").write_text("{")
    (ledger.folder(2) / "rank_00000.json").write_text("{}")
    assert [each.number for each in ledger.attempts()] == [2]
    assert read_ends(ledger.folder(2)) == {}
    assert "0001.json is damaged" in caplog.text and "rank_00000.json is damaged" in caplog.text


def test_a_full_disk_does_not_end_a_run(ledger, attempt, monkeypatch, caplog):
    begun = attempt(None)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffmegatron.attempts.ends.write_durably", full)
    monkeypatch.setattr("diffmegatron.attempts.ledger.write_durably", full)
    record = RankRecord(ledger.folder(1), 0)
    record.set_step(1, "run")
    record.end(0)
    assert ledger.end(begun).cause == "fault"
    assert caplog.text.count("cannot write") == 4


def test_a_heartbeat_every_five_seconds_and_at_the_end(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    record = RankRecord(tmp_path, 0)
    seen = []
    for step in range(13):
        record.set_step(step, "run/a" if step < 8 else "run/b")
        beat = read_heartbeat(tmp_path)
        seen.append((beat.step, beat.first_step, beat.run_dir))
        now[0] += 1.0
    assert [step for step, _, _ in seen] == [0, 0, 0, 0, 0, 5, 5, 5, 8, 8, 8, 8, 8]
    assert seen[7:9] == [(5, 0, "run/a"), (8, 8, "run/b")]
    record.end(0)
    assert read_heartbeat(tmp_path).step == 12
    RankRecord(tmp_path, 1).set_step(99, "run/b")
    assert read_heartbeat(tmp_path).step == 12, "only rank 0 writes heartbeats"


def test_an_attempt_keeps_a_free_port_outside_the_ephemeral_range():
    keys = [f"/runs/{name}/attempts/0001" for name in range(100)]
    ports = [free_port(key) for key in keys]
    assert all(20_000 <= port < 30_000 for port in ports)
    assert len(set(ports)) > 90, "jobs on the same node rarely choose the same port"
    with socket.create_server(("", ports[0])):
        assert free_port(keys[0]) != ports[0]
    assert free_port(keys[0]) == ports[0]


def test_ending_a_missing_attempt_is_an_error(tmp_path):
    with pytest.raises(UserError, match="is not the directory of an attempt"):
        end(tmp_path / "attempts/0003")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_during_the_torch_import_is_recorded_as_a_stop(number, tiny_recipe, tmp_path):
    tiny_recipe()
    command = [sys.executable, "-m", "diffmegatron", "train", str(tmp_path / "tiny.yaml")]
    environment = {
        "DIFFMEGATRON_ATTEMPT": str(tmp_path),
        **{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
    }
    process = subprocess.Popen(command, env=os.environ | environment)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == EXIT_STOPPED
    said = read_ends(tmp_path)[0]
    assert isinstance(said, End) and said.status == EXIT_STOPPED
    assert said.reason == f"{signal.Signals(number).name} before the run had begun"


def test_an_error_is_recorded_with_its_message(tmp_path):
    command = [forks.python(), "-m", "diffmegatron", "train", "nowhere.yaml"]
    environment = {"DIFFMEGATRON_ATTEMPT": str(tmp_path), "RANK": "3"}
    subprocess.run(command, env=os.environ | environment, check=False, capture_output=True)
    said = read_ends(tmp_path)[3]
    assert (said.status, said.step) == (2, None)
    assert said.reason == "cannot read nowhere.yaml: No such file or directory"


def test_a_rank_above_1_5_times_the_median_time_is_a_straggler():
    assert slow([1.0, 1.0, 1.6, 1.1]) == (2,)
    assert slow([1.0, 1.0, 1.4, 1.1]) == ()
    assert slow([1.0, 4.0]) == (1,)
    assert slow([2.0]) == ()


@pytest.mark.parametrize(
    ("reports", "slow_in", "hosts"), [(10, 6, ("n1",)), (10, 5, ()), (9, 9, ()), (40, 21, ("n1",))]
)
def test_a_host_is_slow_if_its_rank_was_slow_in_most_reports(
    reports, slow_in, hosts, ledger, attempt
):
    begun = attempt(None)
    record = RankRecord(ledger.folder(begun.number))
    record.set_step(3, "run")
    for number in range(reports):
        record.add_report((3,) if number < slow_in else ())
    record.end(EXIT_STOPPED)
    assert ledger.end(begun).stragglers == hosts


def test_a_host_once_slow_and_once_blamed_is_bad(ledger, attempt, monkeypatch):
    for status in (EXIT_STOPPED, 137):
        begun = attempt(None)
        for rank in range(4):
            record = RankRecord(ledger.folder(begun.number), rank)
            record.set_step(3, "run")
            for _ in range(10):
                record.add_report((3,) if status == EXIT_STOPPED else ())
            monkeypatch.setenv("SLURMD_NODENAME", f"n{rank // 2}")
            record.end(status if rank == 3 or status == EXIT_STOPPED else 143)
        ledger.end(begun)
    assert bad_hosts(ledger.attempts()) == ["n1"]


@pytest.mark.parametrize(
    ("spares", "trained", "status", "hosts"),
    [(1, True, 69, ["n1"]), (0, True, 69, []), (1, False, 75, [])],
)
def test_a_spare_node_replaces_a_blamed_node(
    spares, trained, status, hosts, ledger, attempt, monkeypatch
):
    begun = attempt(None)
    for rank in range(4):
        monkeypatch.setenv("SLURMD_NODENAME", f"n{rank // 2}")
        record = RankRecord(ledger.folder(begun.number), rank)
        record.set_step(3, "run")
        if trained:
            record.set_step(4, "run")
        record.end(137 if rank == 3 else 143)
    ended, found, without = end(ledger.folder(begun.number), spares)
    assert (ended.hosts, found, without) == (("n1",), status, hosts)


def test_a_spare_node_replaces_an_unfit_node(ledger, attempt, monkeypatch):
    for spares, status in {0: 75, 1: 69}.items():
        begun = attempt(None)
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
        RankRecord(ledger.folder(begun.number), 2).end(71, "its clock")
        assert end(ledger.folder(begun.number), spares)[1:] == (status, ["n1"])
