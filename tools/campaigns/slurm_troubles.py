"""The troubles of a month on a cluster, inflicted on a job on a real Slurm (``slurm.py``).

An attempt is one start of the job. A trouble is a function that waits for a suitable moment in the
first attempt after a given one, causes a failure, and returns a description of the failure. Before
it returns, it repairs what an operator would repair: a node, a disk or a recipe.

Each trouble has two arguments. ``run`` is the run to disturb. ``after`` is the number of the newest
attempt that has ended or that an earlier trouble hit.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from diffmegatron.attempts.ends import ATTEMPT, read_heartbeat
from diffmegatron.attempts.ledger import Attempt, Ledger
from diffmegatron.training.monitoring.metrics import newest_entries
from tools.campaigns.slurm_cluster import Cluster

# Lines of slurm.conf for a second partition, whose jobs preempt those of the first partition.
SETTINGS = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
# Free bytes that a full disk still has. They are enough for the small files of an attempt, but not
# for a rank's file of a checkpoint.
_LEFT_FREE = 256 << 10
_WAIT_SECONDS = 1800.0


class OverTooSoonError(Exception):
    """The job left Slurm's queue before an attempt began that a trouble could disturb."""


@dataclass
class ClusterRun:
    """A run on a cluster, which troubles disturb.

    The campaign also has an undisturbed run of this class, which no trouble is called with.

    Attributes:
        cluster: running cluster.
        recipe: recipe that jobs are launched with.
        cluster_file: file for ``launch --cluster``.
        run_dir: folder of the run, on a small disk of its own.
        pick: source of random moments, ranks and nodes.
        log: function that is called with a line of text for each event.
        job: Slurm's number of the newest job; empty before the first launch.
        launched: time of the newest launch, in seconds since 1970. Attempts that began earlier have
            ended.
        hit: numbers of the attempts that the newest trouble has ended or will end.
    """

    cluster: Cluster
    recipe: Path
    cluster_file: Path
    run_dir: Path
    pick: random.Random
    log: Callable[[str], None]
    job: str = ""
    launched: float = 0.0
    hit: tuple[int, ...] = ()

    def launch(self) -> None:
        """Launch the run as an operator does, once the previous job has left the queue."""
        self.until(lambda: not self.is_queued(), "the previous job has left the queue")
        self.launched = time.time()
        command = [sys.executable, "-m", "diffmegatron", "launch", str(self.recipe), "--nodes=2"]
        deadline = time.monotonic() + _WAIT_SECONDS
        while True:
            result = subprocess.run(
                [*command, f"--cluster={self.cluster_file}"],
                env=self.cluster.environment,
                capture_output=True,
                text=True,
                check=False,
            )
            if found := re.search(r"submitted job (\d+)", result.stdout):
                break
            # If an earlier instance of this program was killed, its job may still count as running
            # for a while. Try again until the job has ended.
            if "is used by job" not in result.stderr or time.monotonic() > deadline:
                raise RuntimeError(f"launch: {result.stdout}{result.stderr}")
            time.sleep(10)
        self.job = found[1]
        self.log(f"launched job {self.job}")

    def is_queued(self) -> bool:
        """Return whether the job runs or waits in Slurm's queue."""
        state = self.cluster.job(self.job)["JobState"] if self.job else ""
        return state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")

    def newest(self) -> Attempt | None:
        """Return the newest attempt; None if there is none."""
        attempts = Ledger(self.run_dir).attempts()
        return attempts[-1] if attempts else None

    def ended(self) -> int:
        """Return the number of the newest attempt that has ended, or 0.

        It is read from the ledger, the record of all attempts in ``run_dir``.
        """
        return max((a.number for a in Ledger(self.run_dir).attempts() if a.ended), default=0)

    def over(self) -> int:
        """Return the number of the newest attempt that has ended or that a trouble hit, or 0."""
        return max(self.ended(), *self.hit, 0)

    def until(self, holds: Callable[[], bool], what: str, seconds: float = _WAIT_SECONDS) -> None:
        """Wait until ``holds()`` is true; after ``seconds``, raise TimeoutError with ``what``."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so in time: {what}\n{self.cluster.logs()}")
            time.sleep(0.2)

    def next(self, after: int) -> Attempt:
        """Wait until the newest launch has an attempt with a number above ``after``, and return it.

        Raises:
            OverTooSoonError: If the job left the queue without such an attempt.
        """
        while True:
            newest, is_queued = self.newest(), self.is_queued()
            if newest is not None and newest.number > after and newest.began > self.launched:
                return newest
            if not is_queued:
                raise OverTooSoonError(f"job {self.job} ended without an attempt after {after}")
            time.sleep(0.2)

    def begun(self, after: int) -> Attempt:
        """Wait for an attempt with a number above ``after``, record it as hit, and return it."""
        attempt = self.next(after)
        self.hit = (attempt.number,)
        return attempt

    def also_hit(self, after: int) -> None:
        """Wait for an attempt with a number above ``after``, and add it to the attempts hit."""
        self.hit += (self.next(after).number,)

    def trained(self, after: int) -> Attempt:
        """Wait until an attempt above number ``after`` has trained 2 to 15 steps; record it as hit.

        Returns:
            The attempt, which still trains.
        """
        steps = self.pick.randint(2, 15)
        while True:
            attempt = self.begun(after)
            if attempt.ended is not None:
                after = attempt.number  # it ended too early, so wait for the next attempt
                continue
            beat = read_heartbeat(Ledger(self.run_dir).folder(attempt.number))
            if beat is not None and self.step(attempt.began) >= beat.first_step + steps:
                return attempt
            time.sleep(0.1)

    def step(self, since: float) -> int:
        """Return the newest step in the metrics; -1 if it was not recorded after ``since``.

        Args:
            since: time in seconds since 1970.
        """
        entries = [entry for entry in newest_entries(self.run_dir) if "train/loss" in entry]
        return int(entries[-1]["step"]) if entries and entries[-1]["time"] > since else -1

    def ranks(self, attempt: Attempt) -> dict[int, int]:
        """Wait until all ranks of an attempt have started; return their process ids by rank."""
        found: dict[int, int] = {}
        ours = f"{ATTEMPT}={Ledger(self.run_dir).folder(attempt.number)}".encode()

        def all_there() -> bool:
            found.clear()
            for path in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    variables = (path / "environ").read_bytes().split(b"\0")
                    rank = next((v[5:] for v in variables if v.startswith(b"RANK=")), b"")
                    if ours in variables and rank:
                        found[int(rank)] = int(path.name)
            return len(found) == attempt.facts.ranks

        self.until(all_there, "all ranks have processes")
        return found

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands and return its output."""
        return self.cluster.call(*command)

    def limit_soon(self) -> None:
        """Set a time limit in one to two minutes, and wait until it has requeued the job.

        Then restore the original limit, for the requeued job.
        """
        before = self.cluster.job(self.job)
        parts = [int(part) for part in re.split("[-:]", before["RunTime"])]
        minutes = (parts[-3] * 3600 + parts[-2] * 60 + parts[-1]) // 60 + 2
        self.limit(str(minutes))
        self.until(
            lambda: self.cluster.job(self.job)["Restarts"] != before["Restarts"],
            f"job {self.job} is requeued at its time limit",
        )
        self.limit(before["TimeLimit"])

    def limit(self, limit: str) -> None:
        """Set the time limit of the job."""
        self.call("scontrol", "update", f"JobId={self.job}", f"TimeLimit={limit}")

    def disk(self) -> Path:
        """Return the folder at which the run's disk is mounted."""
        return self.run_dir.parent


def time_limit(run: ClusterRun, after: int) -> str:
    """Reach the time limit while the run trains."""
    run.trained(after)
    run.limit_soon()
    return "the time limit comes near"


def time_limit_in_start(run: ClusterRun, after: int) -> str:
    """Reach the time limit while the ranks start."""
    run.begun(after)
    run.limit_soon()
    return "the time limit comes near while the ranks start"


def time_limit_unsaved(run: ClusterRun, after: int) -> str:
    """Reach the time limit while all ranks are stopped and cannot save."""
    attempt = run.trained(after)
    for process in run.ranks(attempt).values():
        os.kill(process, signal.SIGSTOP)
    run.limit_soon()
    return "all ranks stand still (SIGSTOP) until the time limit has passed"


def preempted(run: ClusterRun, after: int) -> str:
    """Preempt the job by a job of another partition, with time to save."""
    run.trained(after)
    _preempt(run, 120)
    return "preempted, with a GraceTime of 120 s"


def preempted_at_once(run: ClusterRun, after: int) -> str:
    """Preempt the job without time to save."""
    run.trained(after)
    _preempt(run, 0)
    return "preempted, with no GraceTime"


def _preempt(run: ClusterRun, grace: int) -> None:
    run.call("scontrol", "update", "PartitionName=main", f"GraceTime={grace}")
    command = ["sbatch", "--parsable", "--partition=urgent", "--exclusive", "--output=/dev/null"]
    number = run.call(*command, f"--nodes={len(run.cluster.nodes)}", "--wrap=sleep 1").strip()
    run.cluster.wait(number)


def node_dies(run: ClusterRun, after: int) -> str:
    """Kill all processes of a node, wait until Slurm has noticed it, and start the node again.

    Slurm notices it after 30 seconds without an answer from the node.
    """
    node = run.pick.choice(run.trained(after).facts.nodes)
    run.cluster.kill_node(node)
    run.until(lambda: "down" in _state(run, node), f"Slurm sees that {node} is down")
    run.cluster.start_node(node)
    run.until(lambda: "down" not in _state(run, node), f"{node} is back")
    return f"every process of {node} killed; the node is back once Slurm has seen it down"


def node_set_down(run: ClusterRun, after: int) -> str:
    """Set a node's state to DOWN, as an administrator does, and bring the node back."""
    node = run.pick.choice(run.trained(after).facts.nodes)
    run.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=broken")
    time.sleep(5)
    if "down" in _state(run, node):  # otherwise slurmd has already registered the node again
        run.call("scontrol", "update", f"NodeName={node}", "State=RESUME")
    return f"an administrator sets {node} down"


def _state(run: ClusterRun, node: str) -> str:
    return run.call("sinfo", "--noheader", f"--nodes={node}", "--format=%T").split()[0]


def crash(run: ClusterRun, after: int) -> str:
    """Kill a rank in training, by SIGKILL or SIGSEGV.

    The kernel sends SIGKILL when memory is exhausted.
    """
    attempt = run.trained(after)
    number = run.pick.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV])
    rank, process = run.pick.choice(sorted(run.ranks(attempt).items()))
    os.kill(process, number)
    return f"{number.name} to rank {rank}"


def crash_in_start(run: ClusterRun, after: int) -> str:
    """Kill a rank while it starts: in the preflight checks or during its imports."""
    attempt = run.begun(after)
    rank = run.pick.randrange(attempt.facts.ranks)
    time.sleep(run.pick.uniform(0, 4))
    while True:
        # The rank's process of the preflight checks may end at this moment. Then wait for the
        # rank's training process, and kill it instead.
        with suppress(ProcessLookupError):
            os.kill(run.ranks(attempt)[rank], signal.SIGKILL)
            return f"SIGKILL to rank {rank} while it starts"


def hang(run: ClusterRun, after: int) -> str:
    """Stop a rank by SIGSTOP, so that all other ranks wait for it until a watchdog ends them."""
    attempt = run.trained(after)
    rank, process = run.pick.choice(sorted(run.ranks(attempt).items()))
    os.kill(process, signal.SIGSTOP)
    return f"SIGSTOP to rank {rank}, until a watchdog ends it all"


def full_disk(run: ClusterRun, after: int) -> str:
    """Fill the disk so that no save succeeds, stop the job, and launch it again on the full disk.

    At the end, the disk space is freed.
    """
    attempt = run.trained(after)
    filler = run.disk() / "of_somebody_else"

    def has_ended_without_space() -> bool:
        """Fill the disk again, and return whether the job has ended.

        The removal of old checkpoints may have freed space.
        """
        _fill(filler, _LEFT_FREE)
        return not run.is_queued()

    deadline = time.monotonic() + 5
    run.until(lambda: has_ended_without_space() or time.monotonic() > deadline, "saves fail")
    run.call("scancel", "--signal=USR1", run.job)
    run.until(has_ended_without_space, "the job has ended")
    # Free some space, because a launch needs it for small files.
    os.truncate(filler, filler.stat().st_size - _LEFT_FREE)
    run.launch()
    run.also_hit(attempt.number)
    run.until(lambda: not run.is_queued(), "the job that found no space has ended")
    filler.unlink()
    return "the disk is full; asked to stop, launched again before there is space"


def _fill(filler: Path, left_free: int) -> None:
    """Extend a file until its disk has only ``left_free`` free bytes."""
    free = shutil.disk_usage(filler.parent).free
    if free > left_free:
        with filler.open("ab") as file, suppress(OSError):
            file.write(bytes(free - left_free))


def mistake(run: ClusterRun, after: int) -> str:
    """Edit the recipe so that the job's next attempt must fail, and stop the running attempt.

    The recipe is restored when the job has ended after the next attempt.
    """
    attempt = run.trained(after)
    right = run.recipe.read_text()
    run.recipe.write_text(run.pick.choice(MISTAKES)(right))
    run.call("scancel", "--signal=USR1", run.job)
    run.also_hit(attempt.number)
    run.until(lambda: not run.is_queued(), "the job has ended")
    run.recipe.write_text(right)
    return "the recipe is edited while the job is at work, which is then asked to stop"


MISTAKES = (
    lambda text: text.replace("hidden_size: 64", "hidden_size: 128", 1),
    lambda text: text.replace("vocab_size: 320", "vocab_size: 256", 1),
)


def cancelled(run: ClusterRun, after: int) -> str:
    """Cancel the job; the campaign launches it again."""
    run.trained(after)
    run.call("scancel", run.job)
    run.until(lambda: not run.is_queued(), "the job has ended")
    return "scancel; launched again"


# For each trouble: its kind; the allowed causes of the end of an attempt that it hit, as the ledger
# (the record of all attempts) names them; and how often it happens in a month.
TROUBLES: dict[Callable[[ClusterRun, int], str], tuple[str, set[str], int]] = {
    time_limit: ("time limit", {"stopped", "lost"}, 5),
    time_limit_in_start: ("time limit", {"stopped", "lost"}, 1),
    time_limit_unsaved: ("time limit", {"lost", "stopped", "fault"}, 1),
    preempted: ("preemption", {"stopped", "lost"}, 4),
    preempted_at_once: ("preemption", {"lost", "stopped"}, 2),
    node_dies: ("node failure", {"lost", "fault"}, 2),
    node_set_down: ("node failure", {"lost", "stopped"}, 2),
    crash: ("crash", {"fault"}, 5),
    crash_in_start: ("crash", {"fault"}, 2),
    hang: ("hang", {"fault"}, 3),
    full_disk: ("full disk", {"mistake"}, 1),
    mistake: ("recipe mistake", {"stopped", "mistake"}, 2),
    cancelled: ("cancelled", {"lost", "stopped"}, 1),
}
