"""Ranks that form a process group although another program tries to take their port first.

Rank 0 plays the other program: before it joins the group, it tries to listen on the port. The ranks
are started through :mod:`tests.ranks` and by torchrun.
"""

import socket
from contextlib import ExitStack, suppress

import torch
from torch import distributed

from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch


def main() -> None:
    """Try to take the port on rank 0, then form the group; rank 0 prints the number of ranks."""
    launch = read_launch()
    assert launch.master is not None
    with ExitStack() as stack:
        if launch.rank == 0:
            with suppress(OSError):
                stack.enter_context(socket.create_server(("", launch.master[1])))
        with default_group(meeting_seconds=60):
            arrived = torch.ones(1)
            distributed.all_reduce(arrived)
            if launch.rank == 0:
                print(f"{int(arrived)} ranks met", flush=True)


if __name__ == "__main__":
    main()
