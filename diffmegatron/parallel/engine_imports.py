"""Faster import of torch, Megatron-core and DeepSpeed."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing_engines() -> Iterator[None]:
    """Make imports inside the context faster; the imported modules work as usual.

    Megatron-core (``jit_fuser``) and DeepSpeed (Muon) call ``torch.compile`` during the import.
    Inside the context, ``torch.compile`` of a function is postponed until the function is first
    called, so that the import does not load Inductor. The garbage collector is off.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        from unittest import mock

        import torch

        with mock.patch.object(torch, "compile", _compiling_when_called(torch.compile)):
            yield
    finally:
        if collecting:
            gc.enable()


def _compiling_when_called(compile_: Callable[..., Any]) -> Callable[..., Any]:
    def delayed(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(delayed, **options)
        if not hasattr(model, "__code__"):  # Modules and other objects are compiled as usual.
            return compile_(model, **options)
        from torch.compiler import is_compiling

        compiled = functools.cache(lambda: compile_(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **keywords: Any) -> Any:
            # If the caller is being compiled, the original function is inlined into it.
            return (model if is_compiling() else compiled())(*args, **keywords)

        return call

    return delayed
