"""Megatron-core without CUDA: redirections for the calls that would raise.

Megatron-core names the device ``cuda`` in a few dozen places. Where no CUDA device exists,
:func:`install` redirects those calls to the CPU, once, before anything is built; where one exists
it does nothing. This is the only place of the project that changes another library, and each
redirection replaces a call that would have raised an error, never one that works.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")


def install() -> None:
    """Redirect Megatron-core's CUDA calls to the CPU; nothing where CUDA exists or twice."""
    if torch.cuda.is_available() or getattr(torch.cuda, "redirected_to_cpu", False):
        return
    _redirect_device_queries()
    _redirect_random_state()
    for name in ("tensor", "zeros", "ones", "empty", "empty_like", "full", "arange"):
        setattr(torch, name, _without_cuda(getattr(torch, name)))
    torch.Tensor.cuda = _same  # type: ignore[method-assign,assignment]
    torch.nn.Module.cuda = _same  # type: ignore[method-assign,assignment]
    torch.cuda.redirected_to_cpu = True  # type: ignore[attr-defined]


class _Stream:
    """A stream with nothing to wait for: the CPU runs in order."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = _CPU

    def wait_stream(self, _: object) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


def _redirect_device_queries() -> None:
    stream = _Stream()
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    torch.cuda.Stream = _Stream  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *_: stream  # type: ignore[assignment,return-value]
    torch.cuda.default_stream = lambda *_: stream  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]


def _redirect_random_state() -> None:
    """Megatron's tracker of model-parallel random states keeps the CPU's instead."""
    from megatron.core.tensor_parallel import random

    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()  # type: ignore[assignment]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _same(self: Any, *_: object, **__: object) -> Any:
    return self


def _without_cuda(factory: Callable) -> Callable:
    """``factory`` with ``device="cuda"`` and ``pin_memory`` taken as the CPU's."""

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu
