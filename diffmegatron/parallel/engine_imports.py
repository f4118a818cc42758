"""The first import of torch, Megatron-core and DeepSpeed, without what a start does not need."""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing_engines() -> Iterator[None]:
    """Make the imports inside shorter; nothing that is imported does anything else.

    Megatron-core (``jit_fuser``) and DeepSpeed (its Muon) wrap functions in ``torch.compile`` when
    they are imported, and the wrapping alone loads Inductor. Inside, the wrapping waits for the
    first call of each function. Python's collector pauses: in what modules make there is next to no
    garbage, and it would look through all of it again and again.
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
    """``torch.compile``, for functions put off to their first call."""

    def put_off(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(put_off, **options)
        if not hasattr(model, "__code__"):  # a module, say, which stays what it is
            return compile_(model, **options)
        from torch.compiler import is_compiling

        compiled = functools.cache(lambda: compile_(model, **options))

        @functools.wraps(model)
        def call(*args: Any, **keywords: Any) -> Any:
            # Within a function that is being compiled it is part of that one, as always.
            return (model if is_compiling() else compiled())(*args, **keywords)

        return call

    return put_off
