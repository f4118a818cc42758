"""Program that replaces a training rank and performs the actions in ``RUN_DIR/script.json``.

script.json has a list with one mapping per attempt (start of the job's ranks). The keys of a
mapping are the number of a rank, ``RANK``, for its actions in the run, and ``preflight RANK`` for
its actions in the checks before the run. A value has actions, separated by `` | ``:

- ``end STATUS REASON``: write the file in which a rank records its end, and exit with STATUS.
- ``exit STATUS``: exit with STATUS, but do not write this file.
- ``kill``: die by SIGKILL.
- ``wait``: sleep for two minutes, so that something else must end the rank.
- ``train``: write a heartbeat of a run that has trained from step 3 to step 7.
- ``deaf``: ignore SIGTERM and SIGUSR1.
- ``together``: wait until all ranks have reached this action.
- ``slurm COMMAND``: run a command of Slurm; the job number replaces ``%j`` in the command.
- ``moved``: wait until the job script has recorded a new end time of the job.
- ``orphan``: kill the slurmstepd process that started this rank's shell.

The default is ``end 0`` in the run and ``exit 0`` in the checks.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

attempt = pathlib.Path(os.environ["DIFFMEGATRON_ATTEMPT"])
rank = os.environ["RANK"]
script = json.loads((attempt.parent.parent / "script.json").read_text())
number = int(attempt.name)
actions = script[number - 1] if number <= len(script) else {}


def leave(status: int, reason: str) -> None:
    end = {"status": status, "reason": reason, "step": 7, "host": os.environ["SLURMD_NODENAME"]}
    (attempt / f"rank_{int(rank):05d}.json").write_text(json.dumps(end | {"time": time.time()}))


def parent_of(process: int) -> int:
    stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


if sys.argv[1] == "preflight":
    rank_key, otherwise = f"preflight {rank}", "exit 0"
else:
    rank_key, otherwise = rank, "end 0"
for action in actions.get(rank_key, otherwise).split(" | "):
    name, _, rest = action.partition(" ")
    if name == "end":
        status, _, reason = rest.partition(" ")
        leave(int(status), reason)
        sys.exit(int(status))
    if name == "exit":
        sys.exit(int(rest))
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "deaf":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
    if name == "wait":
        time.sleep(120)
    if name == "together":
        (attempt / f"together_{rank}").touch()
        while len(list(attempt.glob("together_*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
    if name == "train":
        beat = {"time": time.time(), "run_dir": "run", "first_step": 3, "step": 7}
        (attempt / "heartbeat.json").write_text(json.dumps(beat))
    if name == "moved":
        noted = attempt / "job_end"
        before = noted.read_text()
        while noted.read_text() == before:
            time.sleep(0.1)
    if name == "orphan":
        os.kill(parent_of(os.getppid()), signal.SIGKILL)  # the parent of the rank's shell
    if name == "slurm":
        command = rest.replace("%j", os.environ["SLURM_JOB_ID"]).split()
        subprocess.run(command, check=True)
