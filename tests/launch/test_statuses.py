"""Tests of the ways in which ranks can end, in Slurm jobs on two nodes with two ranks each."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from diffmegatron.attempts.ledger import Attempt, Ledger
from tests.launch.conftest import FOUR
from tests.paths import ROOT

DEAF = {str(rank): "deaf | together | wait" for rank in range(4)}
WAITING = {str(rank): "together | wait" for rank in range(4)}
SHORTENED = "deaf | together | slurm scontrol update JobId=%j EndTime=now+1 | wait"
STOPPED = {str(rank): "end 75 SIGUSR1: saved step 7" for rank in range(4)}
# Script of the ranks in each case (see rank.py). A rank without an entry ends with status 0.
SCRIPTS = {
    "finished": [{}],
    "rank 0 finds a mistake and the others hang": [
        WAITING | {"0": "together | end 2 no such key", "1": "deaf | together | wait"}
    ],
    "a mistake that every rank finds": [{str(rank): "end 2 no such key" for rank in range(4)}],
    "asked to stop, and saved": [STOPPED],
    "killed in the middle of training": [WAITING | {"3": "train | together | kill"}],
    "killed": [WAITING | {"3": "together | kill"}],
    "hung, and ended by the watchdog": [WAITING | {"2": "together | exit 1"}],
    "ranks that do not arrive": [
        WAITING | {"0": "together | end 69 of the 4 ranks of WORLD_SIZE, rank 3 did not arrive"}
    ],
    "a node that is not fit": [
        {"preflight 2": "end 71 its clock differs from the others' by +9.0 s"}
    ],
    "asked to stop while it starts": [
        WAITING | {"0": "together | slurm scancel --signal=USR1 %j | wait"}
    ],
    "a slurmstepd that dies before its ranks end": [
        {str(rank): "together | end 75 SIGUSR1: saved step 7" for rank in range(4)}
        | {"preflight 2": "orphan", "3": "orphan | together | end 75 SIGUSR1: saved step 7"}
    ],
    "a time limit that somebody extended": [
        {"0": "slurm scontrol update JobId=%j TimeLimit=60 | moved"}
    ],
    "cancelled after its first time limit": [
        DEAF | {"0": "deaf | together | slurm scancel %j | wait"}
    ],
    "cancelled": [DEAF | {"0": "deaf | together | slurm scancel %j | wait"}],
    "a time limit that somebody shortened": [DEAF | {"0": SHORTENED}],
    "a time limit that somebody shortened twice": 2 * [DEAF | {"0": SHORTENED}],
    "ended from outside": [DEAF | {"0": "deaf | together | slurm scontrol requeue %j | wait"}],
}


@pytest.fixture(scope="module")
def jobs(cluster, tmp_path_factory):
    """Run each script as a job; return a dict: name of the script -> (Slurm's record, attempts)."""
    numbers, folders = {}, {}
    for name, script in SCRIPTS.items():
        folder = folders[name] = tmp_path_factory.mktemp("job")
        # Slurm sets SLURM_JOB_END_TIME, in seconds since 1970, when a job starts. With the value 1
        # the first time limit has long passed.
        options = ["--export=ALL,SLURM_JOB_END_TIME=1"] if "first time limit" in name else []
        numbers[name] = submit(cluster, folder, script, options=options)
    return {
        name: (cluster.wait(number), Ledger(folders[name] / "run").attempts())
        for name, number in numbers.items()
    }


def submit(
    cluster,
    folder: Path,
    script,
    *overrides: str,
    spares: int = 0,
    options: Sequence[str] = (),
) -> str:
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "script.json").write_text(json.dumps(script))
    recipe = folder / "tiny.yaml"
    recipe.write_text(FOUR.format(run_dir=run_dir, corpus=folder / "none"))
    job = folder / "job.sh"
    text = (ROOT / "launch/slurm.sh").read_text()
    job.write_text(text.replace("spares=0 ", f"spares={spares} "))
    command = [
        *[
            "sbatch",
            "--parsable",
            f"--nodes={2 + spares}",
            "--ntasks-per-node=2",
            "--cpus-per-task=1",
        ],
        *["--gpus-per-node=0", "--time=30", f"--output={folder}/log"],
        *["--no-kill", *options, str(job), str(recipe), *overrides],
    ]
    return cluster.call(*command).strip()


def the(jobs, name: str) -> tuple[str, list[Attempt]]:
    job, attempts = jobs[name]
    return job["ExitCode"], attempts


def test_a_finished_attempt_ends_the_job_with_0(jobs):
    status, (attempt,) = the(jobs, "finished")
    assert status == "0:0"
    assert (attempt.cause, attempt.facts.nodes) == ("finished", ("127.0.0.1", "127.0.0.2"))


@pytest.mark.parametrize(
    "name", ["rank 0 finds a mistake and the others hang", "a mistake that every rank finds"]
)
def test_a_mistake_ends_the_job_with_2(name, jobs):
    status, (attempt,) = the(jobs, name)
    assert status == "2:0"
    assert attempt.cause == "mistake"
    assert attempt.reason.endswith(": no such key")


@pytest.mark.parametrize(
    ("name", "cause", "faults", "hosts", "reason"),
    [
        ("asked to stop, and saved", "stopped", 0, (), "SIGUSR1: saved step 7"),
        ("killed", "fault", 1, ("127.0.0.2",), "rank 3 on 127.0.0.2: killed by SIGKILL"),
        (
            "hung, and ended by the watchdog",
            "fault",
            1,
            ("127.0.0.2",),
            "rank 2 on 127.0.0.2: ended with status 1 without a message, probably hung, "
            "by the watchdog",
        ),
        (
            "ranks that do not arrive",
            "fault",
            1,
            (),
            "rank 0 on 127.0.0.1: of the 4 ranks of WORLD_SIZE, rank 3 did not arrive",
        ),
        ("asked to stop while it starts", "stopped", 0, (), "SIGUSR1 ended ranks 0, 1, 2, 3"),
        (
            "a slurmstepd that dies before its ranks end",
            "stopped",
            0,
            (),
            "SIGUSR1: saved step 7",
        ),
        ("ended from outside", "lost", 0, (), "the job ended before ranks 0, 1, 2, 3"),
        (
            "a time limit that somebody shortened",
            "stopped",
            0,
            (),
            "the job reached its time limit",
        ),
    ],
)
def test_stopped_failed_and_lost_attempts_are_requeued(name, cause, faults, hosts, reason, jobs):
    status, (first, second) = the(jobs, name)
    assert status == "0:0", "the second attempt finished"
    assert (first.cause, first.faults, first.hosts) == (cause, faults, hosts)
    assert first.reason.startswith(reason)
    assert second.cause == "finished"


def test_a_fault_in_training_restarts_the_ranks_without_a_requeue(jobs):
    status, (first, second) = the(jobs, "killed in the middle of training")
    assert (status, first.cause, second.cause) == ("0:0", "fault", "finished")
    assert (first.first_step, first.last_step) == (3, 7)
    assert jobs["killed in the middle of training"][0]["Restarts"] == "0"
    assert jobs["killed"][0]["Restarts"] == "1"


def test_a_job_without_time_for_a_step_ends_with_2(jobs):
    status, attempts = the(jobs, "a time limit that somebody shortened twice")
    assert status == "2:0"
    assert [each.cause for each in attempts] == ["stopped", "mistake", "mistake"]
    assert "stopped by its time limit twice before a new step" in attempts[-1].reason


def test_an_extended_time_limit_is_recorded_for_the_ranks(jobs):
    _, (attempt,) = the(jobs, "a time limit that somebody extended")
    (stage,) = attempt.stages
    end = int((Ledger(Path(stage)).folder(attempt.number) / "job_end").read_text())
    assert end == pytest.approx(attempt.began + 3600, abs=60)


@pytest.mark.parametrize("name", ["cancelled", "cancelled after its first time limit"])
def test_cancelled_jobs_are_not_requeued(name, jobs):
    job, (attempt,) = jobs[name]
    assert (job["JobState"], job["Restarts"], attempt.cause) == ("CANCELLED", "0", None)


def test_an_unfit_node_is_left_out_of_the_next_attempt(jobs):
    status, (first, second) = the(jobs, "a node that is not fit")
    assert (status, first.unfit) == ("0:0", ("127.0.0.2",))
    assert first.reason == "rank 2 on 127.0.0.2: its clock differs from the others' by +9.0 s"
    assert first.facts.nodes == ("127.0.0.1", "127.0.0.2")
    assert second.facts.nodes == ("127.0.0.1", "127.0.0.3")


def test_a_mistyped_key_ends_the_job_before_any_rank_starts(cluster, tmp_path):
    number = submit(cluster, tmp_path, [{}], "training.stepz=3")
    assert cluster.wait(number)["ExitCode"] == "2:0"
    assert not (tmp_path / "run/attempts").exists()
    assert "did you mean 'steps'" in (tmp_path / "log").read_text()


def test_a_spare_node_replaces_a_failed_node(cluster, tmp_path):
    script = [WAITING | {"3": "train | together | kill"}, {}]
    number = submit(cluster, tmp_path, script, spares=1)
    job = cluster.wait(number)
    assert (job["ExitCode"], job["Restarts"], job["NumNodes"]) == ("0:0", "0", "3")
    first, second = Ledger(tmp_path / "run").attempts()
    assert (first.cause, first.hosts, second.cause) == ("fault", ("127.0.0.2",), "finished")
    assert first.facts.nodes == ("127.0.0.1", "127.0.0.2")
    assert second.facts.nodes == ("127.0.0.1", "127.0.0.3")
    assert {each.facts.ranks for each in (first, second)} == {4}
