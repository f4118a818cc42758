"""Patches that let Megatron-core run without CUDA.

Apply them only in a context: ``transformers`` on the meta device needs the original functions.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_CPU = torch.device("cpu")
_RANDOM_LOGGER = "megatron.core.tensor_parallel.random"


@contextmanager
def without_cuda() -> Iterator[None]:
    """Redirect Megatron-core's CUDA calls to the CPU inside the context, if CUDA is unavailable."""
    if torch.cuda.is_available():
        yield
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    stream = _Stream()
    with ExitStack() as stack:
        for owner, name, replacement in (
            (torch.cuda, "current_device", lambda: _CPU),
            (torch.cuda, "synchronize", lambda *_, **__: None),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "current_stream", lambda *_: stream),
            (torch.cuda, "default_stream", lambda *_: stream),
            (torch.cuda, "stream", lambda *_: nullcontext()),
            (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
            (schedules, "torch", _TorchOnCpu()),
            # With the following four, Megatron's tracker of random states stores CPU states.
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
            (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        ):
            stack.enter_context(mock.patch.object(owner, name, replacement))
        # Megatron warns if the CPU's random state changes in a context for a GPU's state, which
        # here is the CPU's.
        stack.enter_context(_without_warning(_RANDOM_LOGGER, "CPU RNG state changed"))
        yield


@contextmanager
def _without_warning(logger: str, beginning: str) -> Iterator[None]:
    """Drop the messages of a logger that begin with a text."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    logging.getLogger(logger).addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger(logger).removeFilter(is_other)


class _TorchOnCpu:
    """Replacement of the name ``torch`` in Megatron's ``pipeline_parallel.schedules``.

    Its ``tensor`` and ``zeros`` ignore the arguments that need CUDA. A ``TorchFunctionMode`` would
    slow down every operation.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, pin_memory: bool = False, **keywords: Any) -> Tensor:
        return torch.tensor(data, **keywords)

    def zeros(self, *size: Any, device: Any = None, **keywords: Any) -> Tensor:
        return torch.zeros(*size, **keywords)


class _Stream:
    """Replacement of a CUDA stream; it never waits, because the CPU runs operations in order."""

    device = _CPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""
