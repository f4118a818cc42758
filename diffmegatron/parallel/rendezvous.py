"""The ranks of a launch meet within a limit; those that arrive name those that do not.

Torch waits for half an hour and then says that it did, on each rank for itself.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from diffmegatron.errors import MachineError, UserError
from diffmegatron.files import clipped, reason
from diffmegatron.parallel.launcher import LaunchEnvironment

# Rank 0 decides who is there; the others wait for that as much longer.
_OUTCOME, _MARGIN_SECONDS = "outcome", 15.0
_SHOWN_RANKS = 16
# How the one problem begins that another start does not solve.
_SIZES = "rank 0 was started with WORLD_SIZE"


def meet(launch: LaunchEnvironment, seconds: float) -> Store:
    """A store that all ranks of a launch share.

    Args:
        launch: with a ``master``.
        seconds: how long to wait for rank 0, and rank 0 for the others.

    Raises:
        UserError: on every rank that is there; they were told of another ``WORLD_SIZE``.
        MachineError: likewise; ``MASTER_ADDR`` or ``MASTER_PORT`` is of no use now, or ranks did
            not arrive.
    """
    place = _place(launch)
    # Restarted ranks must not find what those before them left in the agent's store. Elsewhere
    # the store is new, and agents of several machines do not count restarts alike.
    attempt = launch.attempt if launch.agent_store else 0
    store = PrefixStore(f"attempt_{attempt}", _connected(launch, seconds, place))
    arrivals = [f"arrived/{rank}" for rank in range(launch.ranks)]
    try:
        store.set(arrivals[launch.rank], str(launch.ranks))
        problem = (_judge if launch.rank == 0 else _ask)(store, arrivals, launch.rank, seconds)
    except DistError:
        raise MachineError(f"rank 0 left {place} before all ranks had arrived") from None
    if problem.startswith(_SIZES):
        raise UserError(f"{problem} ({place})")
    if problem:
        raise MachineError(f"{problem} ({place})")
    return store


def _judge(store: Store, arrivals: Sequence[str], _: int, seconds: float) -> str:
    """Rank 0: what is wrong with those who are there, told to all of them; empty: nothing."""
    if _until(lambda: store.check(list(arrivals)), seconds):
        problem = _other_sizes(store.multi_get(list(arrivals)))
    else:
        problem = _absent(store, arrivals, seconds)
    store.set(_OUTCOME, problem)
    if problem:  # with this process its store goes
        told = [_told(rank) for rank, key in enumerate(arrivals) if rank and store.check([key])]
        _until(lambda: store.check(told), _MARGIN_SECONDS)
    return problem


def _ask(store: Store, arrivals: Sequence[str], rank: int, seconds: float) -> str:
    """Any other rank: what rank 0 found."""
    if not _until(lambda: store.check([arrivals[0]]), seconds):
        return _absent(store, arrivals, seconds)
    if not _until(lambda: store.check([_OUTCOME]), seconds + _MARGIN_SECONDS):
        return f"rank 0 arrived, and then said nothing for {seconds:g} s"
    problem = store.get(_OUTCOME).decode()
    store.set(_told(rank), "")
    return problem


def _told(rank: int) -> str:
    return f"told/{rank}"


def _absent(store: Store, arrivals: Sequence[str], seconds: float) -> str:
    missing = [str(rank) for rank, key in enumerate(arrivals) if not store.check([key])]
    more = len(missing) - _SHOWN_RANKS
    named = ", ".join(missing[:_SHOWN_RANKS]) + (f" and {more} more" if more > 0 else "")
    return (
        f"of the {len(arrivals)} ranks of WORLD_SIZE, {'ranks' if missing[1:] else 'rank'} {named} "
        f"did not arrive within {seconds:g} s; see why, or start fewer"
    )


def _other_sizes(sizes: Sequence[bytes]) -> str:
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            return (
                f"{_SIZES} {sizes[0].decode()} and rank {rank} with "
                f"{size.decode()}; give all ranks the same"
            )
    return ""


def _connected(launch: LaunchEnvironment, seconds: float, place: str) -> Store:
    assert launch.master is not None
    host, port = launch.master
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise MachineError(
            f"the environment sets MASTER_ADDR {clipped(host)!r}, which cannot be resolved "
            f"({clipped(reason(error))}); give the host of rank 0"
        ) from None
    if launch.rank == 0 and not launch.agent_store:
        return _serve(port, seconds)
    if not _until(lambda: _answers(host, port), seconds):
        raise MachineError(f"rank 0 did not arrive at {place} within {seconds:g} s")
    return _join(host, port, seconds, place)


def _serve(port: int, seconds: float) -> Store:
    # Python's socket, because torch's writes pages to standard error where it fails.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=socket.SOMAXCONN
        )
    except OSError as error:
        raise MachineError(
            f"rank 0 cannot listen on MASTER_PORT {port}: {reason(error)}; give a free port"
        ) from None
    return TCPStore(
        "localhost",
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _join(host: str, port: int, seconds: float, place: str) -> Store:
    """Torch's client waits without a limit for what listens there but is no store."""
    joined: list[Store] = []

    def join() -> None:
        limit = timedelta(seconds=seconds)
        with suppress(DistError):  # it answers, but not as a store does
            joined.append(TCPStore(host, port, timeout=limit, wait_for_workers=False))

    thread = threading.Thread(target=join, name="rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if not joined:
        raise MachineError(f"what listens at {place} is not rank 0 of a run; give a free port")
    return joined[0]


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Whether something became so within a time; asked often at first, then every second."""
    deadline, pause = time.monotonic() + seconds, 0.01
    while not is_so():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    return True


def _place(launch: LaunchEnvironment) -> str:
    assert launch.master is not None
    host, port = launch.master
    return f"MASTER_ADDR {clipped(host)}, MASTER_PORT {port}"
