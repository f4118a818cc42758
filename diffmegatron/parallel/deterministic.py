"""The same bits whenever a step is computed again: torch's switch, and what a GPU needs beside."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have torch compute everything inside in an order that does not change.

    The attention kernels ask torch for this switch: Triton's backward takes its split form, and the
    flash libraries their deterministic one. On a GPU cuBLAS wants a workspace of its own, which has
    to be said before its first product; torch refuses to multiply where the environment says
    another one that is not deterministic.

    Raises:
        RuntimeError: from torch, inside, at an operation that it has no such form of.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    says_workspace = torch.cuda.is_available() and _WORKSPACE not in os.environ
    if says_workspace:
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        if says_workspace:
            del os.environ[_WORKSPACE]
