"""Ranks whose port another program takes before they meet, if it can.

The program is rank 0 itself, which listens there first. Started through :mod:`tests.ranks` and by
torchrun.
"""

import socket
from contextlib import ExitStack, suppress

import torch
from torch import distributed

from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch


def main() -> None:
    """Take the port, meet, and let rank 0 print how many ranks met."""
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
