"""A stand-in for a rank: does what ``RUN_DIR/script.json`` says for this attempt and rank.

The script is a list with a mapping for each attempt, from the rank's number to what it does, with
`` | `` between; a rank that is not in there ends with 0. Of the checks before the run the key is
``preflight RANK``; a rank without it leaves nothing. ``end STATUS REASON`` writes an end as a rank
does, ``exit STATUS`` leaves none, ``kill`` dies by SIGKILL, ``wait`` waits to be ended, ``train``
says that it has gone from step 3 to 7, ``deaf`` hears SIGTERM no more, ``together`` waits until all
ranks are there, and ``slurm COMMAND`` calls it for this job.
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
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name == "wait":
        time.sleep(120)
    if name == "together":
        (attempt / f"together_{rank}").touch()
        while len(list(attempt.glob("together_*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.02)
    if name == "train":
        beat = {"time": time.time(), "run_dir": "run", "first_step": 3, "step": 7}
        (attempt / "heartbeat.json").write_text(json.dumps(beat))
    if name == "slurm":
        subprocess.run([*rest.split(), os.environ["SLURM_JOB_ID"]], check=True)
