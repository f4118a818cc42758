"""The environment variables that a launcher (torchrun, srun) sets for each process of a run."""

import math
import os
import re
from dataclasses import dataclass, replace

from diffmegatron.errors import UserError
from diffmegatron.files import shorten

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Upper limit of WORLD_SIZE, LOCAL_RANK and the number of restarts.
_MAX_RANKS = 10_000_000


@dataclass(frozen=True)
class LaunchEnvironment:
    """Rank and rendezvous of this process, and time limits of its Slurm job (None if unknown).

    Attributes:
        local_rank: rank of this process on its machine, from 0.
        master: host and port of the rendezvous store; None for a single process without launcher.
        agent_store: whether torchrun's agent serves the store and keeps it through restarts.
        attempt: number of times that torchrun has restarted this machine's ranks.
        job_end: end of the job in seconds since 1970.
        signal_seconds: seconds before the job's end at which Slurm sends a stop signal.
        kill_wait: seconds from Slurm's SIGTERM to its SIGKILL.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    master: tuple[str, int] | None = None
    agent_store: bool = False
    attempt: int = 0
    job_end: float | None = None
    signal_seconds: float | None = None
    kill_wait: float | None = None


def read_time_limits() -> LaunchEnvironment:
    """Read and check the time limits of the Slurm job; leave the other values at their defaults."""
    return LaunchEnvironment(
        job_end=_seconds("SLURM_JOB_END_TIME", " since 1970"),
        signal_seconds=_seconds("DIFFMEGATRON_SIGNAL_SECONDS"),
        kill_wait=_seconds("DIFFMEGATRON_KILL_WAIT"),
    )


def read_launch() -> LaunchEnvironment:
    """Read and check the launcher's environment variables."""
    local_rank = _read_integer("LOCAL_RANK", 0, _MAX_RANKS, default=0)
    limits = replace(read_time_limits(), local_rank=local_rank)
    if not (_set("RANK") or _set("WORLD_SIZE")):
        return limits
    missing = [name for name in _RENDEZVOUS if not _set(name)]
    if missing:
        present = [name for name in _RENDEZVOUS if _set(name)]
        raise UserError(
            f"the environment sets {' and '.join(present)} but not {' and '.join(missing)}; start "
            "the ranks with torchrun or launch/slurm.sh, or unset the former to use one process"
        )
    ranks = _read_integer("WORLD_SIZE", 1, _MAX_RANKS)
    return replace(
        limits,
        rank=_read_integer("RANK", 0, ranks - 1),
        ranks=ranks,
        master=(os.environ["MASTER_ADDR"], _read_integer("MASTER_PORT", 1, 65535)),
        agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_read_integer("TORCHELASTIC_RESTART_COUNT", 0, _MAX_RANKS, default=0),
    )


def check_launch() -> None:
    """Raise UserError if the launcher's environment variables are incomplete or wrong."""
    read_launch()


def _set(name: str) -> bool:
    return bool(os.environ.get(name))


def _read_integer(name: str, low: int, high: int, default: int | None = None) -> int:
    if not _set(name) and default is not None:
        return default
    value = os.environ[name]
    if not re.fullmatch("[0-9]{1,9}", value) or not low <= int(value) <= high:
        raise UserError(
            f"the environment sets {name} {shorten(value)!r}; it must be a whole number from {low} "
            f"to {high}"
        )
    return int(value)


def _seconds(name: str, since: str = "") -> float | None:
    if not _set(name):
        return None
    value = os.environ[name]
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds):
        raise UserError(
            f"the environment sets {name} {shorten(value)!r}; it must be a number of seconds"
            f"{since}, or unset"
        )
    return seconds
