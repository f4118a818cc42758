"""Rendezvous of all ranks through a store, with a time limit and an error that names missing ranks.

Each rank sets a key ``arrived/RANK`` in a store (a key-value server). Rank 0 waits for all keys and
stores the outcome. Torch's own rendezvous waits half an hour and does not name the missing ranks.
"""

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from diffmegatron.errors import MachineError, UserError
from diffmegatron.files import os_error_text, shorten
from diffmegatron.parallel.launcher import LaunchEnvironment

# Key under which rank 0 stores the outcome, and additional time to store and read it.
_OUTCOME, _MARGIN_SECONDS = "outcome", 15.0
# Largest number of missing ranks in an error message.
_SHOWN_RANKS = 16
# First words of the message about different values of WORLD_SIZE. A restart cannot solve this
# problem, so ``meet`` raises a UserError and not a MachineError.
_SIZES = "rank 0 was started with WORLD_SIZE"


def meet(launch: LaunchEnvironment, seconds: float) -> Store:
    """Wait until all ranks have arrived, and return a store that is connected to all of them.

    ``seconds`` limits each single wait for other ranks, not the sum of the waits.
    """
    assert launch.master is not None
    host, port = launch.master
    place = f"MASTER_ADDR {shorten(host)}, MASTER_PORT {port}"
    # A store of torchrun's agent survives restarts, so the prefix hides keys of earlier attempts.
    # With several machines, each agent has its own count of restarts, so prefixes could differ.
    # launch/torchrun.sh therefore uses the agent's store only for a run on a single machine.
    attempt = launch.attempt if launch.agent_store else 0
    store = PrefixStore(f"attempt_{attempt}", _connected(launch, host, port, seconds, place))
    arrivals = [f"arrived/{rank}" for rank in range(launch.ranks)]
    try:
        store.set(arrivals[launch.rank], str(launch.ranks))
        if launch.rank == 0:
            problem = _decide(store, arrivals, seconds)
        else:
            problem = _wait_for_decision(store, arrivals, launch.rank, seconds)
    except DistError:
        raise MachineError(f"rank 0 left {place} before all ranks had arrived") from None
    if problem.startswith(_SIZES):
        raise UserError(f"{problem} ({place})")
    if problem:
        raise MachineError(f"{problem} ({place})")
    return store


def _decide(store: Store, arrivals: list[str], seconds: float) -> str:
    """Return the problem of the rendezvous, or "" without one, and store it for the other ranks."""
    problem = ""
    if not _wait_until(lambda: store.check(arrivals), seconds):
        problem = _missing_ranks(store, arrivals, seconds)
    else:
        first, *others = (size.decode() for size in store.multi_get(arrivals))
        for rank, size in enumerate(others, start=1):
            if size != first:
                problem = f"{_SIZES} {first} and rank {rank} with {size}; give all ranks the same"
                break
    store.set(_OUTCOME, problem)
    if problem:
        # The store may end with this process. Wait until the arrived ranks have read the problem.
        received = [f"received/{key}" for key in arrivals[1:] if store.check([key])]
        _wait_until(lambda: store.check(received), _MARGIN_SECONDS)
    return problem


def _wait_for_decision(store: Store, arrivals: list[str], rank: int, seconds: float) -> str:
    """Return the problem that rank 0 stored ("" for none), or a message that it stored nothing."""
    if not _wait_until(lambda: store.check([arrivals[0]]), seconds):
        return _missing_ranks(store, arrivals, seconds)
    if not _wait_until(lambda: store.check([_OUTCOME]), seconds + _MARGIN_SECONDS):
        return f"rank 0 arrived, and then sent nothing for {seconds:g} s"
    problem = store.get(_OUTCOME).decode()
    store.set(f"received/{arrivals[rank]}", "")
    return problem


def _missing_ranks(store: Store, arrivals: list[str], seconds: float) -> str:
    missing = [str(rank) for rank, key in enumerate(arrivals) if not store.check([key])]
    more = len(missing) - _SHOWN_RANKS
    named = ", ".join(missing[:_SHOWN_RANKS]) + (f" and {more} more" if more > 0 else "")
    return (
        f"of the {len(arrivals)} ranks of WORLD_SIZE, {'ranks' if missing[1:] else 'rank'} {named} "
        f"did not arrive within {seconds:g} s; read the log of a missing rank, or start fewer ranks"
    )


def _connected(
    launch: LaunchEnvironment, host: str, port: int, seconds: float, place: str
) -> Store:
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise MachineError(
            f"the environment sets MASTER_ADDR {shorten(host)!r}, which cannot be resolved "
            f"({shorten(os_error_text(error))}); give the host of rank 0"
        ) from None
    if launch.rank == 0 and not launch.agent_store:
        return _serve(port, seconds)
    if not _wait_until(lambda: _is_listening(host, port), seconds):
        raise MachineError(f"rank 0 did not arrive at {place} within {seconds:g} s")
    return _join(host, port, seconds, place)


def _serve(port: int, seconds: float) -> Store:
    # If torch opened the socket itself and failed, it would write pages of stack traces.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN
        )
    except OSError as error:
        raise MachineError(
            f"rank 0 cannot listen on MASTER_PORT {port}: {os_error_text(error)}; give a free port"
        ) from None
    return TCPStore(
        "localhost",
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _join(host: str, port: int, seconds: float, place: str) -> Store:
    """Connect to rank 0 in a thread, because torch may wait forever if another server listens."""
    joined: list[Store] = []

    def join() -> None:
        limit = timedelta(seconds=seconds)
        with suppress(DistError):  # Servers of other programs can cause it.
            joined.append(TCPStore(host, port, timeout=limit, wait_for_workers=False))

    thread = threading.Thread(target=join, name="rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if not joined:
        raise MachineError(f"another server than rank 0 listens at {place}; give a free port")
    return joined[0]


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition, and return whether it became true in time."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    return True
