"""All ranks of a launch in one group, and the device of each; without Megatron-core."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

from diffmegatron.errors import UserError
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.rendezvous import meet

log = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)
_MEETING_SECONDS = 600.0
_WRAPPED = "wrapped_by_torch"


def own_device() -> torch.device:
    """The GPU of this rank, which is the current one then; the processor where there are none.

    Raises:
        UserError: there are fewer GPUs than ranks on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # One hardware queue keeps the order in which Megatron overlaps communication and products.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    local_rank, gpus = read_launch().local_rank, torch.cuda.device_count()
    if local_rank >= gpus:
        raise UserError(
            f"the environment sets LOCAL_RANK {local_rank} where {gpus} GPUs are to be seen; give "
            f"each rank a GPU of its own, LOCAL_RANK 0 to {gpus - 1}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def default_group(
    timeout: timedelta = TIMEOUT, meeting_seconds: float = _MEETING_SECONDS
) -> Iterator[None]:
    """All ranks of the launcher; around several :func:`process_groups` it joins them once.

    Torch cannot start a second default group under ``torchrun``: it would find the first one's
    keys in the store and wait forever.

    Args:
        timeout: how long a collective may wait.
        meeting_seconds: how long the ranks may take to arrive.

    Raises:
        UserError: the ranks cannot meet, or there is no GPU for this one.
    """
    if distributed.is_initialized():
        yield
        return
    device = own_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    launch = read_launch()
    # DeepSpeed asks the environment, also where a launcher leaves it out.
    os.environ.setdefault("LOCAL_RANK", "0")
    store = distributed.HashStore() if launch.master is None else meet(launch, meeting_seconds)
    store.set_timeout(timeout)
    with _prefixing_tracebacks_once():
        distributed.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.ranks, timeout=timeout
        )
    log.info("rank %d of %d on %s", distributed.get_rank(), distributed.get_world_size(), device)
    try:
        yield
    finally:
        # Without this gloo now and then aborts at exit.
        distributed.destroy_process_group()


@contextmanager
def _prefixing_tracebacks_once() -> Iterator[None]:
    """Around the start of a default group, for which torch wraps ``sys.excepthook``.

    It puts the rank before every line of a traceback, also after the group has ended, and once
    more for each group that follows.
    """
    sys.excepthook = wrapped = getattr(sys.excepthook, _WRAPPED, sys.excepthook)
    yield
    if sys.excepthook is not wrapped:
        setattr(sys.excepthook, _WRAPPED, wrapped)
