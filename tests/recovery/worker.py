"""Ranks that run a job of :mod:`tests.recovery.test_ranks`, started through :mod:`tests.ranks`.

The arguments are ``OUTCOME JOB``. Rank r writes the outcome to ``OUTCOME.r``. JOB is JSON with the
``recipe`` file, the ``overrides`` and optionally a ``fault``. A fault is a list of three values: a
key of ``FAULTS``, the rank that has the fault, and the argument of the fault's function.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from diffmegatron.training import trainer
from diffmegatron.training.saving import saver
from diffmegatron.training.trainer import train


@contextmanager
def replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace ``module.name`` by ``make(module.name)`` within the context."""
    original = getattr(module, name)
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def nan_gradient(call: int) -> Callable[[Any], Any]:
    """Return a ``make`` for :func:`replaced` that causes a NaN gradient in step ``call`` (from 1).

    Only the gradient of one parameter is NaN. The loss stays finite.
    """

    def make(forward_backward: Any) -> Any:
        calls = [0]

        def wrapper(engine: Any, *arguments: Any, **options: Any) -> torch.Tensor:
            calls[0] += 1
            if calls[0] != call:
                return forward_backward(engine, *arguments, **options)
            parameter = next(p for n, p in engine.network.named_parameters() if "layers" in n)
            hook = parameter.register_hook(lambda gradient: gradient * torch.nan)
            loss = forward_backward(engine, *arguments, **options)
            hook.remove()
            return loss

        return wrapper

    return make


def failing(times: int) -> Callable[[Any], Any]:
    """Return a ``make`` for :func:`replaced`; a full disk fails the first ``times`` writes."""

    def make(write_pieces: Any) -> Any:
        left = [times]

        def wrapper(*arguments: Any, **options: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(28, "No space left on device")
            return write_pieces(*arguments, **options)

        return wrapper

    return make


def signalled(call: int) -> Callable[[Any], Any]:
    """Return a ``make`` for :func:`replaced` that causes a SIGTERM in step ``call`` (from 1)."""

    def make(forward_backward: Any) -> Any:
        calls = [0]

        def wrapper(*arguments: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return forward_backward(*arguments, **options)

        return wrapper

    return make


FAULTS = {
    "nan_gradient": (trainer, "forward_backward", nan_gradient),
    "failing": (saver, "write_pieces", failing),
    "signalled": (trainer, "forward_backward", signalled),
}


def run(job: dict[str, Any]) -> Any:
    """Run a job; return whether the run finished, or the sentence of its UserError."""
    recipe = load_recipe(job["recipe"], job["overrides"])
    fault, rank, argument = job.get("fault", (None, None, None))
    try:
        if distributed.get_rank() != rank:
            return train(recipe)
        module, name, make = FAULTS[fault]
        with replaced(module, name, make(argument)):
            return train(recipe)
    except UserError as error:
        return str(error)


def main() -> None:
    """Run the job and write its outcome to ``OUTCOME.r``, where r is this rank."""
    outcome, job = sys.argv[1:]
    distributed.init_process_group("gloo")
    Path(f"{outcome}.{distributed.get_rank()}").write_text(json.dumps(run(json.loads(job))))
    distributed.destroy_process_group()
