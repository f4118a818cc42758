"""The two ends of every attempt, as the job script calls them around srun."""

import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import diffmegatron
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
from diffmegatron.files import clipped, shown

_LIBRARIES = ("torch", "megatron-core", "deepspeed", "triton")
# Of a job that had as many faults in a row as it may.
_EXIT_FAULT = 1
# Of one that need not leave its nodes.
_EXIT_AGAIN = 69


def begin(
    config: Path, overrides: Sequence[str], nodes: Sequence[str], run_dir: Path | None = None
) -> str:
    """Begin an attempt on the first node of a job.

    Args:
        config: recipe.
        overrides: of its keys.
        nodes: host names of the job, in the order of the ranks.
        run_dir: of the job, as ``launch`` has read it from the recipe; None: not known. A mistake
            that hides the ``run_dir`` of the recipe is written into its ledger.

    Returns:
        Lines for the shell that set ``DIFFMEGATRON_ATTEMPT``, ``MASTER_ADDR``, ``MASTER_PORT``
        (free now) and ``WORLD_SIZE``.

    Raises:
        UserError: the recipe is wrong, the ranks do not fit it, or nothing can be written.
    """
    ranks = _ranks()
    job = os.environ.get("SLURM_JOB_ID", "")
    facts = Facts(job=job, nodes=tuple(nodes), ranks=ranks, versions=versions(), commit=commit())
    ledger = None if run_dir is None else Ledger(run_dir)
    try:
        recipes = load_stages(config, overrides)
        ledger = ledger_of(recipes)
        for recipe in recipes:
            recipe.data_parallel(ranks)
        address, port = _address(nodes), _free_port()
        attempt = ledger.begin(recipes, facts)
    except UserError as error:
        if ledger is not None:
            ledger.refuse(facts, str(error))
        raise
    settings = {
        ATTEMPT: str(ledger.folder(attempt.number).absolute()),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in settings.items())


def end(folder: Path, spares: int = 0) -> tuple[Attempt, int, list[str]]:
    """End an attempt.

    Args:
        folder: that ``begin`` named.
        spares: nodes of the job that have nothing to do.

    Returns:
        The line of the ledger; what the job is to do, as an exit status: 0 and 2 end it, 1 ends it
        after the last fault that it may have, 75 asks for a requeue, and 69 for the next attempt at
        once; and the hosts that the next attempt shall do without.

    Raises:
        UserError: the attempt is not there.
    """
    ledger = Ledger(folder.parent.parent)
    number = int(folder.name) if folder.name.isdecimal() else 0
    attempt = next((each for each in ledger.attempts() if each.number == number), None)
    if attempt is None:
        raise UserError(f"{shown(folder)} is no directory of an attempt that has begun")
    ended = ledger.end(attempt)
    bad = bad_hosts(ledger.attempts())
    replaced = sorted({*bad, *ended.hosts} & set(ended.facts.nodes))
    if replaced and len(replaced) <= spares and _goes_on(ended):
        return ended, _EXIT_AGAIN, replaced
    return ended, status_of(ended, bad), bad


def _goes_on(attempt: Attempt) -> bool:
    """Whether a fault came in training, or of a node that is known to be no good."""
    is_known = attempt.has_trained or bool(attempt.unfit)
    return attempt.cause == Cause.FAULT and not attempt.is_over and is_known


def status_of(attempt: Attempt, bad_hosts: Sequence[str] = ()) -> int:
    """What a job is to do whose last attempt has ended, as :func:`end` says.

    Only a run that was in the middle of training goes on at once. What fails while it starts is
    better given the time that a requeue takes: Slurm finds a dead node within minutes.
    """
    if not attempt.is_over:
        at_once = attempt.cause == Cause.FAULT and attempt.has_trained and not bad_hosts
        return _EXIT_AGAIN if at_once else EXIT_STOPPED
    if attempt.cause == Cause.FINISHED:
        return 0
    return UserError.exit_status if attempt.cause == Cause.MISTAKE else _EXIT_FAULT


def sentence(attempt: Attempt) -> str:
    """An attempt that has ended, in one line."""
    faults = f", fault {attempt.faults} of {MAX_FAULTS}" if attempt.cause == Cause.FAULT else ""
    return f"attempt {attempt.number}: {attempt.cause}{faults}: {attempt.reason}"


def versions() -> dict[str, str]:
    """Of this package and of the libraries that compute, without importing them."""
    found = {"diffmegatron": diffmegatron.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit of the code, ``-dirty`` behind it if files differ; None: no checkout."""
    folder = Path(diffmegatron.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _ranks() -> int:
    value = os.environ.get("SLURM_NTASKS", "")
    if not value.isdecimal() or int(value) < 1:
        raise UserError(
            f"the environment sets SLURM_NTASKS {clipped(value)!r}; an attempt begins within a "
            "Slurm job that was given --ntasks-per-node"
        )
    return int(value)


def _address(nodes: Sequence[str]) -> str:
    """Of this machine, the first node: Slurm's name for it, or its own where that is no host's."""
    names = [*nodes[:1], socket.getfqdn(), socket.gethostname()]
    for name in names:
        try:
            socket.getaddrinfo(name, None)
        except (OSError, UnicodeError):
            continue
        return name
    raise UserError(
        f"no name of the first node can be resolved: {clipped(', '.join(names))}; give the nodes "
        "names that are hosts"
    )


def _free_port() -> int:
    """One that nobody listens on now; whoever takes it first costs a restart, on another one."""
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port
