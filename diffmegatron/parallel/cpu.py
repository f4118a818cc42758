"""Megatron-core without CUDA: redirections for the calls that would raise.

Megatron-core names the device ``cuda`` in a few dozen places. Where no CUDA device exists, these
calls go to the CPU inside :func:`without_cuda`; where one exists nothing changes. Beside
``engine_imports.py`` this is the only place of the project that changes another library. Each
redirection replaces a call that would have raised an error, never one that works, and all end with
the context: what else runs in the process (``transformers`` building a model on the meta device,
say) must find torch as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


@contextmanager
def without_cuda() -> Iterator[None]:
    """Redirect Megatron-core's CUDA calls to the CPU; does nothing where CUDA exists."""
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
            # Megatron's tracker of model-parallel random states keeps the CPU's instead.
            (torch.cuda, "manual_seed", torch.manual_seed),
            (torch.cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state()),
            (random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
            (random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        ):
            stack.enter_context(_replaced(owner, name, replacement))
        yield


class _TorchOnCpu:
    """``torch`` for Megatron's modules that make tensors on ``cuda`` by name, or pinned.

    In their names only: a ``TorchFunctionMode`` would see every operation of a step, a seventh of
    the time of a small one.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, data: Any, *, pin_memory: bool = False, **keywords: Any) -> Tensor:
        """``torch.tensor``, never pinned."""
        return torch.tensor(data, **keywords)

    def zeros(self, *size: Any, device: Any = None, **keywords: Any) -> Tensor:
        """``torch.zeros`` on the CPU."""
        return torch.zeros(*size, **keywords)


class _Stream:
    """A stream with nothing to wait for: the CPU runs in order."""

    device = _CPU

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


@contextmanager
def _replaced(owner: Any, name: str, replacement: object) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
