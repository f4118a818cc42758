"""A real Slurm on this machine only: munged, slurmctld and one slurmd per node, on loopback.

It needs neither root nor systemd, and ends all its processes when the context of `Cluster` is left.
The nodes are named 127.0.0.1, 127.0.0.2, ..., because these names resolve on every machine. The
number of CPUs in Slurm's configuration is fictitious, and no process is bound to a CPU.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from tests.ports import reserved_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
# PATH in which Slurm's programs are searched. Debian installs daemons in the two added folders,
# which are not on every user's PATH.
SEARCHED = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# KILL_WAIT: seconds from SIGTERM to SIGKILL. REQUEUE_DELAY: minimum seconds between a requeue and
# the next start of a job.
KILL_WAIT, REQUEUE_DELAY = 2, 5
# Seconds that Slurm waits for answers, starts and ends of steps. By default, it waits 10 to 60
# seconds. If a busy machine delays a node's daemon longer, Slurm requeues its jobs, or drains the
# node if a step ends late ("Kill task failed"). A drained node takes no more jobs.
PATIENCE = 600

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire={requeue_delay}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait={kill_wait}
MinJobAge=3600
SlurmdTimeout=30
MessageTimeout={patience}
BatchStartTimeout={patience}
UnkillableStepTimeout={patience}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
GresTypes=gpu
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
NODE = (
    "NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs=64 RealMemory=8000 "
    "Gres=gpu:8 State=UNKNOWN\n"
)


def missing() -> str:
    """Return the reason why no cluster can start on this machine; "" if nothing is missing."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=SEARCHED) is None]
    return f"Slurm is not installed: no {', '.join(absent)}" if absent else ""


class Cluster:
    """Slurm on this machine, which runs inside the context of this object.

    Args:
        folder: folder for all files of Slurm. It contains a Unix socket, and the path of a socket
            is limited to about 100 characters, so the folder's path must be short.
        nodes: number of nodes.
        settings: additional lines of ``slurm.conf``.

    Attributes:
        nodes: names of the nodes.
        environment: environment variables for Slurm's commands.
    """

    def __init__(self, folder: Path, nodes: int, settings: str = "") -> None:
        self._folder, self._stack, self._settings = folder, ExitStack(), settings
        self._daemons: dict[str, subprocess.Popen] = {}
        self.nodes = [f"127.0.0.{number}" for number in range(1, nodes + 1)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
        self.environment = inherited | {
            "PATH": SEARCHED,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def __enter__(self) -> Self:
        munge = self._folder / "munge"
        with self._stack:  # ends the daemons that have started if a later one fails
            self._configure()
            self._start(
                "munged",
                "--foreground",
                "--force",
                f"--socket={munge}/socket",
                f"--key-file={munge}/key",
                f"--pid-file={munge}/pid",
                f"--log-file={munge}/log",
                f"--seed-file={munge}/seed",
            )
            self.until("munged listens", (munge / "socket").exists)
            self._start("slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            self.until("all nodes are idle", self._all_idle)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.call("scancel", "--state=PENDING", "--state=RUNNING", "--me")
            self.until("no job is left", lambda: not self.call("squeue", "-h"))
        self._stack.close()
        self._end_what_jobs_left()

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._daemons[node] = self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon, job steps and their processes, like a power cut."""
        self._daemons[node].kill()
        name = f"SLURMD_NODENAME={node}".encode()
        for process in self._of_jobs():
            if name in _environment(process):
                with suppress(OSError):
                    _kill_step_of(process)
                    os.kill(process, signal.SIGKILL)

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands and return its output; fail if its exit status is not 0."""
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=20
        )
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job, as ``scontrol show job`` prints them, by name."""
        pairs = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

    def wait(self, number: str, seconds: float = 200.0) -> dict[str, str]:
        """Wait until a job has reached a final state, and return its fields."""
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        self.until(
            f"job {number} has ended", lambda: self.job(number)["JobState"] in ended, seconds
        )
        return self.job(number)

    def until(self, what: str, holds, seconds: float = 60.0) -> None:
        """Wait until ``holds()`` is true; fail with ``what`` and all logs after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"not so after {seconds:g} s: {what}\n{self.logs()}"
            time.sleep(0.1)

    def _configure(self) -> None:
        for name in ("munge", "state", "log", "gpu", *(f"spool.{node}" for node in self.nodes)):
            (self._folder / name).mkdir(parents=True)
        self._folder.chmod(0o755)
        (self._folder / "munge/key").write_bytes(os.urandom(128))
        (self._folder / "munge/key").chmod(0o600)
        controller, *ports = self._stack.enter_context(reserved_ports(1 + len(self.nodes)))
        nodes = [
            NODE.format(name=name, host=socket.gethostname().split(".")[0], port=port)
            for name, port in zip(self.nodes, ports, strict=True)
        ]
        text = CONFIGURATION.format(
            folder=self._folder,
            port=controller,
            user=self._user(),
            kill_wait=KILL_WAIT,
            requeue_delay=REQUEUE_DELAY,
            patience=PATIENCE,
        )
        (self._folder / "slurm.conf").write_text(text + "".join(nodes) + self._settings)
        for number in range(8):  # gres/gpu requires existing files
            (self._folder / f"gpu/{number}").touch()
        (self._folder / "gres.conf").write_text(f"Name=gpu File={self._folder}/gpu/[0-7]\n")
        # slurmd loads a plugin for cgroups even if nothing uses cgroups. Slurm 23.11 introduced the
        # plugin "disabled".
        release = self._release()
        plugin = "disabled" if release >= (23, 11) else "cgroup/v1"
        (self._folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")

    def _user(self) -> str:
        return subprocess.run(
            ["id", "-un"], capture_output=True, text=True, check=True
        ).stdout.strip()

    def _release(self) -> tuple[int, ...]:
        release = self.call("slurmd", "-V").split()[-1]
        return tuple(int(part) for part in release.split(".")[:2])

    def _start(self, program: str, *arguments: str) -> subprocess.Popen:
        log = self._stack.enter_context((self._folder / f"log/{program}.out").open("ab"))
        process = subprocess.Popen(
            [program, *arguments],
            env=self.environment,
            executable=shutil.which(program, path=SEARCHED),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self._stack.callback(_ended, process)
        return process

    def _all_idle(self) -> bool:
        command = ["sinfo", "-h", "-N", "-p", "main", "-o", "%t"]
        result = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=20
        )
        return result.stdout.split() == ["idle"] * len(self.nodes)

    def logs(self) -> str:
        """Return the nodes' states and exited daemons, and the last lines of every daemon's log."""
        exited = {name: daemon.poll() for name, daemon in self._daemons.items()}
        states = subprocess.run(
            ["scontrol", "--oneliner", "show", "nodes"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        ).stdout
        files = sorted((self._folder / "log").iterdir())
        logs = "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in files)
        return f"exit statuses of slurmd: {exited}\n{states}\n{logs}"

    def _end_what_jobs_left(self) -> None:
        for process in [*self._of_jobs(), *self._of_steps()]:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _of_steps(self) -> list[int]:
        """Return the process ids of this cluster's slurmstepd daemons, which run the job steps.

        They do not end with slurmctld, but wait for it forever. They cannot be found by their
        environment, which they overwrite, but each has the log of its node open.
        """
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (path / "comm").read_text().startswith("slurmstepd"):
                    logs = (str(each.readlink()) for each in (path / "fd").iterdir())
                    if any(log.startswith(f"{self._folder}/log/") for log in logs):
                        found.append(int(path.name))
        return found

    def _of_jobs(self) -> list[int]:
        """Return the ids of the processes of this cluster's jobs.

        They are recognized by their environment variables, which name this cluster and a job.
        """
        ours = f"SLURM_CONF={self._folder}/slurm.conf".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            variables = _environment(int(path.name))
            if ours in variables and any(each.startswith(b"SLURM_JOB_ID=") for each in variables):
                found.append(int(path.name))
        return found


def _environment(process: int) -> list[bytes]:
    """Return the initial environment of a process as NAME=VALUE; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _kill_step_of(process: int) -> None:
    """Kill the parent of a process if the parent is a slurmstepd daemon.

    These daemons are found through their children, because their own environment does not name the
    node.
    """
    parent = int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd"):
        os.kill(parent, signal.SIGKILL)


def _ended(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
