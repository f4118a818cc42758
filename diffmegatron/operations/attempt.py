"""Begin and end an attempt (one start of a job's ranks) for the job script."""

import math
import os
import shlex
import socket
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

from diffmegatron.attempts.decision import Cause
from diffmegatron.attempts.ends import ATTEMPT, EXIT_STOPPED
from diffmegatron.attempts.ledger import (
    MAX_FAULTS,
    Attempt,
    Facts,
    Ledger,
    bad_hosts,
    ledger_of,
)
from diffmegatron.config.load import load_stages
from diffmegatron.errors import UserError
from diffmegatron.files import escape, format_path, shorten
from diffmegatron.operations.installed_code import git_commit, library_versions
from diffmegatron.parallel.launcher import read_time_limits
from diffmegatron.training.safeguards import read_job_end

_EXIT_FAULTS, _EXIT_RESTART = 1, 69
# Linux itself assigns ports from 32768 to 60999, and Kubernetes from 30000 to 32767.
_PORTS = range(20_000, 30_000)


def begin(
    config: Path, overrides: Sequence[str], nodes: Sequence[str], run_dir: Path | None = None
) -> str:
    """Begin an attempt on the first node of a job, and return shell lines for the job script.

    The lines export ``DIFFMEGATRON_ATTEMPT``, ``MASTER_ADDR``, ``MASTER_PORT`` and ``WORLD_SIZE``.

    Args:
        nodes: host names of the job, in the order of the ranks.
        run_dir: folder of the ledger (record of all attempts), used if the recipe is unreadable.
            With None, the mistake in an unreadable recipe is not recorded.
    """
    ranks = _num_ranks()
    job = os.environ.get("SLURM_JOB_ID", "")
    facts = Facts(
        job=job,
        nodes=tuple(nodes),
        ranks=ranks,
        versions=library_versions(),
        commit=git_commit(),
    )
    ledger = None if run_dir is None else Ledger(run_dir)
    try:
        recipes = load_stages(config, overrides)
        ledger = ledger_of(recipes)
        for recipe in recipes:
            recipe.check_ranks(ranks)
        address = _address(nodes)
        attempt = ledger.begin(recipes, facts)
    except UserError as error:
        if ledger is not None:
            ledger.record_mistake(facts, str(error))
        raise
    folder = str(ledger.folder(attempt.number).absolute())
    settings = {
        ATTEMPT: folder,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port(folder)),
        "WORLD_SIZE": str(ranks),
    }
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings.items())


def end(folder: Path, spares: int = 0) -> tuple[Attempt, int, list[str]]:
    """End an attempt: write its entry in the ledger, and decide how the job continues.

    Args:
        folder: the attempt's directory, as exported by :func:`begin`.
        spares: number of the job's nodes that have no ranks and can replace failed nodes.

    Returns:
        The entry in the ledger, the exit status of the job script, and the hosts that the next
        attempt must avoid. If spare nodes replace these hosts, the status is 69. Otherwise, it is
        that of :func:`exit_status`.
    """
    ledger = Ledger(folder.parent.parent)
    number = int(folder.name) if folder.name.isdecimal() else 0
    attempt = next((each for each in ledger.attempts() if each.number == number), None)
    if attempt is None:
        raise UserError(
            f"{format_path(folder)} is not the directory of an attempt; give RUN_DIR/attempts/NNNN"
        )
    limits = read_time_limits()
    job_end = read_job_end(folder, limits.job_end)
    stop = math.inf if job_end is None else job_end - (limits.signal_seconds or 0.0)
    ended = ledger.end(attempt, is_job_over=time.time() > stop)
    bad = bad_hosts(ledger.attempts())
    replaced = sorted({*bad, *ended.hosts} & set(ended.facts.nodes))
    if replaced and len(replaced) <= spares and _may_use_spares(ended):
        return ended, _EXIT_RESTART, replaced
    return ended, exit_status(ended, bad), bad


def _may_use_spares(attempt: Attempt) -> bool:
    # If the fault came before the first step, use spares only if preflight found an unfit node.
    is_known = attempt.has_trained or bool(attempt.unfit)
    return attempt.cause == Cause.FAULT and not attempt.is_over and is_known


def exit_status(attempt: Attempt, bad_hosts: Sequence[str] = ()) -> int:
    """Return the exit status of the job script if spare nodes replace no host (see :func:`end`).

    0: finished. 1: too many faults. 2: a mistake of the user. 69: restart the ranks in this job.
    75: requeue the job.

    Here, status 69 requires a fault after a training step, and no hosts to avoid (``bad_hosts``).
    """
    if not attempt.is_over:
        at_once = attempt.cause == Cause.FAULT and attempt.has_trained and not bad_hosts
        return _EXIT_RESTART if at_once else EXIT_STOPPED
    if attempt.cause == Cause.FINISHED:
        return 0
    return UserError.exit_status if attempt.cause == Cause.MISTAKE else _EXIT_FAULTS


def describe_attempt(attempt: Attempt) -> str:
    """Describe an ended attempt in one line."""
    faults = f", fault {attempt.faults} of {MAX_FAULTS}" if attempt.cause == Cause.FAULT else ""
    return f"attempt {attempt.number}: {attempt.cause}{faults}: {escape(attempt.reason)}"


def _num_ranks() -> int:
    value = os.environ.get("SLURM_NTASKS", "")
    if not value.isdecimal() or int(value) < 1:
        raise UserError(
            f"SLURM_NTASKS is {shorten(value)!r}; begin an attempt inside a Slurm job with "
            "--ntasks-per-node"
        )
    return int(value)


def _address(nodes: Sequence[str]) -> str:
    """Return a resolvable name of the first node; Slurm's name for the node is tried first."""
    names = [*nodes[:1], socket.getfqdn(), socket.gethostname()]
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError):
            continue
        return name
    raise UserError(
        f"no name of the first node can be resolved: {shorten(', '.join(names))}; name the nodes "
        "after their hosts"
    )


def free_port(key: str) -> int:
    """Return a port from 20000 to 29999 on which nothing listens.

    The search begins at a hash of ``key``, so two jobs on a node usually choose different ports.
    """
    first = zlib.crc32(os.fsencode(key)) % len(_PORTS)
    for offset in range(len(_PORTS)):
        port = _PORTS[(first + offset) % len(_PORTS)]
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
    raise UserError(
        f"every port from {_PORTS.start} to {_PORTS.stop - 1} of the first node is in use; free one"
    )
