"""A stand-in for a rank: does what ``RUN_DIR/script.json`` says for this attempt and rank.

The script is a list with a mapping for each attempt, from the rank's number to what it does, with
`` | `` between; a rank that is not in there ends with 0. Of the checks before the run the key is
``preflight RANK``; a rank without it leaves nothing. ``end STATUS REASON`` writes an end as a rank
does, ``exit STATUS`` leaves none, ``kill`` dies by SIGKILL, ``wait`` waits to be ended, ``train``
says that it has gone from step 3 to 7, ``deaf`` ignores SIGTERM and SIGUSR1, ``together`` waits
until all ranks are there, ``slurm COMMAND`` runs one of Slurm's commands with ``%j`` as the job's
number, ``moved`` waits until the job script has noted that the job ends at another time, and
``orphan`` kills the slurmstepd of its node.
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
        os.kill(parent_of(os.getppid()), signal.SIGKILL)  # of the shell around this rank
    if name == "slurm":
        command = rest.replace("%j", os.environ["SLURM_JOB_ID"]).split()
        subprocess.run(command, check=True)
