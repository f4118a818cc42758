"""Choice of an attention backend: the order in which `auto` tries backends, and their limits.

This module does not import torch, which is slow. :mod:`.installed_backends` finds the installed
libraries and calls :func:`choose_backend`.
"""

import os
from dataclasses import replace

from .registry import BACKENDS, FEATURES, Call, Op

# Backends in the order in which "auto" tries them, by operation and device type. Backends that have
# never run on a GPU are missing ("cudnn_2call") or come after all libraries ("triton" attention).
# "blocked" is last: it is a loop in Python, with thousands of small products for 64K positions.
AUTO_ORDER: dict[Op, dict[str, tuple[str, ...]]] = {
    "differential": {
        "cpu": ("blocked",),
        "cuda": ("flash_2call", "flash_4call", "sdpa_4call", "triton", "blocked"),
    },
    "softmax": {"cpu": ("sdpa", "blocked"), "cuda": ("sdpa", "triton", "blocked")},
    "subtraction": {"cpu": ("pytorch",), "cuda": ("triton", "pytorch")},
}


def needed_features(*, documents: bool, context: int, communication: str | None) -> frozenset[str]:
    """Return the keys of `FEATURES` that a kernel must support for a parallel layout.

    Args:
        documents: whether attention stays within packed documents.
        context: number of context-parallel ranks.
        communication: "ring", "all_gather" or "ulysses"; None for one rank.
    """
    needs = {"documents"} if documents else set()
    if context > 1 and communication == "ring":
        needs |= {"chunks", "masked chunks", "offsets"} if documents else {"chunks"}
    if context > 1 and communication == "all_gather" and documents:
        needs.add("offsets")
    return frozenset(needs)


def why_not(name: str, call: Call, libraries: frozenset[str]) -> str | None:
    """Return the reason why a backend cannot compute a call, or None if it can.

    The reason is a clause without a subject, e.g. "needs a cuda device, got cpu". `libraries` are
    the usable optional libraries. In Triton's interpreter a backend with `is_interpretable` has no
    limits of device, dtype and head_dim.
    """
    backend = BACKENDS[call.op][name]
    if backend.is_interpretable and is_interpreting():
        backend = replace(backend, devices=None, dtypes=None, head_dims=None)
    if backend.devices is not None and call.device not in backend.devices:
        return f"needs a {' or '.join(backend.devices)} device, got {call.device}"
    if backend.library is not None and backend.library not in libraries:
        return (
            f"needs the library {backend.library}, which is not installed or not usable (a warning "
            "then says why)"
        )
    if backend.dtypes is not None and call.dtype not in backend.dtypes:
        return f"takes {', '.join(backend.dtypes)}, got {call.dtype}"
    if backend.head_dims is not None and call.head_dim not in backend.head_dims:
        return f"takes head_dim {', '.join(map(str, backend.head_dims))}, got {call.head_dim}"
    if missing := sorted(call.needs & backend.lacks):
        return f"cannot {' nor '.join(FEATURES[feature] for feature in missing)}"
    in_chunks = backend.chunk_dtypes.get(call.device, (call.dtype,))
    if "chunks" in call.needs and call.dtype not in in_chunks:
        names = ", ".join(in_chunks)
        return f"takes {names} chunk by chunk on {call.device}, got {call.dtype}"
    return None


def is_interpreting() -> bool:
    """Return whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def choose_backend(backend: str, call: Call, libraries: frozenset[str]) -> tuple[str, str]:
    """Return the name of the backend that computes a call, and the reason for the choice.

    `backend` is a key of `BACKENDS[call.op]`, or "auto" for the first backend of `AUTO_ORDER` that
    can run. `libraries` are the usable optional libraries.

    Raises:
        ValueError: the name is unknown, the named backend cannot run the call, or with "auto" no
            backend can.
    """
    known = BACKENDS[call.op]
    if backend == "auto":
        passed_over: list[str] = []
        orders = AUTO_ORDER[call.op]
        for name in orders.get(call.device, orders["cpu"]):
            reason = why_not(name, call, libraries)
            if reason is None:
                return name, "; ".join([known[name].note, *passed_over])
            passed_over.append(f"not {name}: {reason}")
        raise ValueError(f"no attention backend can run on {call.device}: {'; '.join(passed_over)}")
    if backend not in known:
        raise ValueError(f"backend={backend!r} is unknown; choose auto or {', '.join(known)}")
    if reason := why_not(backend, call, libraries):
        raise ValueError(f"backend={backend!r} cannot run: it {reason}")
    return backend, "requested by name"
