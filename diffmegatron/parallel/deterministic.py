"""Deterministic algorithms of torch and cuBLAS, for bitwise reproducible training."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic_algorithms(*, only_warns: bool = False) -> Iterator[None]:
    """Use deterministic algorithms inside the context.

    Operations without one raise an error, or with ``only_warns`` cause a warning. Enter the context
    before cuBLAS reads ``CUBLAS_WORKSPACE_CONFIG`` at the first matrix product.
    """
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    sets_workspace = torch.cuda.is_available() and _WORKSPACE not in os.environ
    if sets_workspace:
        os.environ[_WORKSPACE] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=only_warns)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        if sets_workspace:
            del os.environ[_WORKSPACE]
