"""One polling thread per process for all of gloo's process groups.

By default each group has its own device, whose thread wakes a hundred times a second, and two
threads more. A process that trains has eighteen groups, and a worker of pytest some hundred, if
failed runs keep theirs. On a busy machine these threads take more CPU time than the tests.
"""

from datetime import timedelta
from functools import cache
from typing import Any

from torch.distributed import Store, distributed_c10d

_Gloo: Any = distributed_c10d.ProcessGroupGloo


@cache
def _device() -> Any:
    return _Gloo.create_device(interface="lo")


class _SharingGloo(_Gloo):
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        options = _Gloo._Options()
        options._devices, options._timeout, options._threads = [_device()], timeout, 1
        super().__init__(store, rank, size, options)


def share_device() -> None:
    """Make all groups that this process and its forks create later use one device per process."""
    distributed_c10d.ProcessGroupGloo = _SharingGloo
