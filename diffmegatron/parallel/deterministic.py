"""Bitwise reproducible steps: torch's switch, and the cuBLAS workspace that it needs."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make torch use deterministic algorithms inside.

    The attention kernels read torch's switch too: Triton's backward pass uses its split form, and
    the flash libraries their deterministic form. On a GPU cuBLAS needs a fixed workspace, set
    before its first product; torch refuses products if the environment sets a workspace that is
    not deterministic.

    Raises:
        RuntimeError: From torch, at an operation that has no deterministic form.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    sets_workspace = torch.cuda.is_available() and _WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        if sets_workspace:
            del os.environ[_WORKSPACE]
