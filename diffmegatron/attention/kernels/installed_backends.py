"""The optional libraries that are installed here, and the backends that can run with them."""

import logging
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from .registry import (
    BACKENDS,
    LIBRARIES,
    OPS,
    Backend,
    Call,
    Op,
    choose_backend,
    known_backend,
    why_not,
)
from .wrappers import cudnn_graphs, flash, varlen

log = logging.getLogger(__name__)

# Lowest GPU compute capability that the optional libraries support (8.0 is Ampere, 9.0 Hopper).
LEAST_CAPABILITY = (8, 0)
LEAST_CAPABILITIES = {"flash_attn_3": (9, 0), "flash_attn_4": (9, 0)}


@cache
def importable_libraries() -> frozenset[str]:
    """Return the optional libraries that are usable here.

    A library is usable if its import works and the GPU, if any, has the least compute capability.
    The imports of Triton, and without a GPU of torch's varlen_attn, are not tried, because they
    take long. A library that is installed but not usable causes a warning.
    """
    return frozenset(name for name in LIBRARIES if _is_usable(name))


def _is_usable(library: str) -> bool:
    try:
        if find_spec(LIBRARIES[library]) is None:
            return False
    except (ImportError, OSError):  # The parent package of the module is missing or broken.
        return False
    reason = _unusable_reason(library)
    if reason is not None:
        log.warning("%s is installed but not usable: %s", library, reason)
    return reason is None


def _unusable_reason(library: str) -> str | None:
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        lowest = LEAST_CAPABILITIES.get(library, LEAST_CAPABILITY)
        if capability < lowest:
            least, found = ("{}.{}".format(*pair) for pair in (lowest, capability))
            return f"it needs a GPU of compute capability {least} or later, this one has {found}"
    elif library == "varlen_attn":
        return None
    if library == "triton":
        return None
    try:
        # The import fails if the library was built for another version of torch or CUDA.
        if library == "cudnn":
            cudnn_graphs.load_library()
        else:
            if library in ("varlen_attn", "flash_attn_3"):
                varlen.check_torch()
            if library != "varlen_attn":
                flash.load_library(library)
    except (ImportError, OSError, ValueError) as error:
        return str(error)
    return None


def call_of(op: Op, q: Tensor, needs: frozenset[str] = frozenset()) -> Call:
    """Return the properties of a call that determine its backend.

    `q` `[batch, length, heads, width]` is the queries, or the `heads` of `api.subtract_noise`.
    """
    return Call(op, q.device.type, dtype_name(q.dtype), q.shape[3], needs, chip_of(q.device))


@cache
def chip_of(device: torch.device) -> int | None:
    """Return the major compute capability of a GPU; None for other devices."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the registry, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@cache
def installed_backend(backend: str, call: Call) -> Backend:
    """Return the backend with this name, or the one that "auto" chooses; log a choice once."""
    name, reason = choose_backend(backend, call, importable_libraries())
    if backend == "auto":
        where = f"{call.device}, {call.dtype}, d={call.head_dim}"
        log.info("%s on %s: %s (%s)", OPS[call.op], where, name, reason)
    return known_backend(call.op, name)


def backend_table(
    op: Op, device: str | None = None, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> list[tuple[str, bool, str]]:
    """Return (name, can run, note or reason why it cannot run) of each backend of an operation."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    call = Call(op, where.type, dtype_name(dtype), head_dim, chip=chip_of(where))
    libraries = importable_libraries()
    rows = []
    for name, backend in BACKENDS[op].items():
        reason = why_not(name, call, libraries)
        rows.append((name, reason is None, reason or backend.note))
    return rows
