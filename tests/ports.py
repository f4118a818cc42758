"""Ports for servers of tests that take the number of a port alone, and no socket."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yield ports that differ, on which nobody listens and which the kernel gives to nobody else.

    A socket is bound to each and does not listen, so that a program which sets ``SO_REUSEADDR``, as
    servers do, can still listen there.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("", 0))
        yield [each.getsockname()[1] for each in held]
