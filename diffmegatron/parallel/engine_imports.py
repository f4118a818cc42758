"""A faster first import of torch, Megatron-core and DeepSpeed."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing_engines() -> Iterator[None]:
    """Shorten the imports inside without changing what the imported modules do.

    At import, Megatron-core (``jit_fuser``) and DeepSpeed (Muon) wrap functions in torch.compile,
    and wrapping alone loads Inductor. Here wrapping is delayed to the first call of each function.
    Python's garbage collector is paused: imports create almost no garbage, and it would traverse
    all modules repeatedly.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        import torch

        compile_ = torch.compile
        torch.compile = _compiling_when_called(compile_)
        try:
            yield
        finally:
            torch.compile = compile_
    finally:
        if collecting:
            gc.enable()


def _compiling_when_called(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``torch.compile`` that compiles each function at its first call."""

    def delayed(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(delayed, **options)
        if not hasattr(model, "__code__"):  # Modules and other objects are compiled as usual.
            return compile_(model, **options)
        from torch.compiler import is_compiling

        compiled = functools.cache(lambda: compile_(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **keywords: Any) -> Any:
            # A function that is being compiled inlines this one.
            return (model if is_compiling() else compiled())(*args, **keywords)

        return call

    return delayed
