"""Ports for tests of servers that can be started only with a port number, not with a socket."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """Yield different free ports that the kernel does not assign to another program.

    A socket is bound to each port, but does not listen. A program that sets ``SO_REUSEADDR``, as
    servers do, can therefore listen on the port.
    """
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("", 0))
        yield [each.getsockname()[1] for each in held]
