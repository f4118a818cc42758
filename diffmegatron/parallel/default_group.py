"""The default process group, which contains all ranks, and the device of a rank.

This module does not import Megatron-core.
"""

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

# Time limit of a collective.
TIMEOUT = timedelta(minutes=30)
# Time limit of each wait for other ranks at the start.
_MEETING_SECONDS = 600.0
# Attribute that default_group adds to torch's sys.excepthook; its value is the previous hook.
_WRAPPED = "wrapped_by_torch"


def own_device() -> torch.device:
    """Return this rank's GPU (``LOCAL_RANK``) and make it current; return the CPU without CUDA."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    # With one hardware queue, kernels start in the order in which Megatron launches them.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    local_rank, gpus = read_launch().local_rank, torch.cuda.device_count()
    if local_rank >= gpus:
        raise UserError(
            f"the environment sets LOCAL_RANK {local_rank}, but {gpus} GPUs are visible; give "
            f"each rank a GPU of its own, LOCAL_RANK 0 to {gpus - 1}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def default_group(
    timeout: timedelta = TIMEOUT, meeting_seconds: float = _MEETING_SECONDS
) -> Iterator[None]:
    """Start torch's default process group for the context, unless it already exists.

    To use several parallel layouts, enter this context once around all of them. Under ``torchrun``,
    a second default group would wait forever. ``timeout`` is the time limit of a collective.
    ``meeting_seconds`` is the time limit of each wait for other ranks at the start.
    """
    if distributed.is_initialized():
        yield
        return
    device = own_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    launch = read_launch()
    # DeepSpeed reads LOCAL_RANK, which some launchers do not set.
    os.environ.setdefault("LOCAL_RANK", "0")
    store = distributed.HashStore() if launch.master is None else meet(launch, meeting_seconds)
    store.set_timeout(timeout)
    # Torch adds a wrapper of sys.excepthook for each default group, so remove the previous one.
    sys.excepthook = wrapped = getattr(sys.excepthook, _WRAPPED, sys.excepthook)
    distributed.init_process_group(
        backend, store=store, rank=launch.rank, world_size=launch.ranks, timeout=timeout
    )
    if sys.excepthook is not wrapped:
        setattr(sys.excepthook, _WRAPPED, wrapped)
    log.info("rank %d of %d on %s", distributed.get_rank(), distributed.get_world_size(), device)
    try:
        yield
    finally:
        # If the group is not destroyed, gloo sometimes aborts at the exit of the process.
        distributed.destroy_process_group()
