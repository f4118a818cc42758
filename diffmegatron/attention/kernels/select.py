"""Which backend computes an attention call, and why.

The choice depends on the device, the dtype, the head dimension, what imports and what the call
needs, and on nothing else. To add a backend: write its module, describe it in `BACKENDS`, and name
it in `AUTO_ORDER` where it should be taken unasked.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module, util
from types import ModuleType

import torch

from .flash import load_library
from .triton_config import DTYPES, HEAD_DIMS, SIXTEEN_BITS

logger = logging.getLogger(__name__)

LIBRARIES = ("triton", "flash_attn", "flex_head_fa")
# All of the libraries are made for Ampere and later.
LEAST_CAPABILITY = (8, 0)
CHUNKS = frozenset({"chunks", "masked chunks"})
WHOLE_SEQUENCES_ONLY = frozenset({"offsets", "lse"}) | CHUNKS

# What a call may need beyond plain causal or full attention.
FEATURES = {
    "documents": "stay within packed documents (cu_seqlens)",
    "offsets": "place queries freely against the keys (query_offset, key_offset)",
    "lse": "return log-sum-exps that can be differentiated",
    "narrow": "take values as wide as the queries",
    "chunks": "attend to a sequence chunk by chunk",
    "masked chunks": "attend chunk by chunk but to all keys or below the diagonal of a square",
}


@dataclass(frozen=True)
class Backend:
    """What one implementation can compute.

    Attributes:
        module: module of this package that holds its `diff_attention`; its `attention_with_lse`
            unless it lacks "lse" and "chunks"; its `chunk_gradients` unless it lacks "chunks".
        devices, dtypes, head_dims: what it takes; None means any.
        library: name of the library it needs beside torch, or None.
        lacks: what it cannot do, out of `FEATURES`.
        chunk_dtypes: what it takes chunk by chunk, by device type; elsewhere what it takes whole.
        fuses_norm: its `diff_attention` takes a `norm` and applies it in its epilogue.
        note: one clause on what it is, shown as the reason of a choice.
    """

    module: str
    note: str
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    library: str | None = None
    lacks: frozenset[str] = frozenset()
    chunk_dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    fuses_norm: bool = False

    def load(self) -> ModuleType:
        """The module of the backend."""
        return import_module(f".{self.module}", __package__)


BACKENDS: dict[str, Backend] = {
    "reference": Backend("reference", "the paper's equations read literally, for tests"),
    "blocked": Backend("blocked", "row blocks in plain PyTorch, deterministic"),
    "triton": Backend(
        "triton_attention",
        "own fused kernels: 6d forward, 10d or 14d backward",
        devices=("cuda",),
        dtypes=DTYPES,
        head_dims=HEAD_DIMS,
        library="triton",
        lacks=frozenset({"narrow"}),
        fuses_norm=True,
    ),
    "flash_2call": Backend(
        "flash_2call",
        "two calls of flex_head_fa with V whole: 6d forward, 14d backward",
        devices=("cuda",),
        dtypes=SIXTEEN_BITS,
        head_dims=(32, 64, 96, 128),
        library="flex_head_fa",
        lacks=WHOLE_SEQUENCES_ONLY,
    ),
    "flash_4call": Backend(
        "flash_4call",
        "four calls of FlashAttention 2: 8d forward, 20d backward",
        devices=("cuda",),
        dtypes=SIXTEEN_BITS,
        head_dims=tuple(range(8, 257, 8)),
        library="flash_attn",
        lacks=WHOLE_SEQUENCES_ONLY,
    ),
    "sdpa_4call": Backend(
        "sdpa",
        "torch's scaled_dot_product_attention, four calls: 8d forward, 20d backward",
        # torch's flash kernels return log-sum-exps, and take no mask but a causal one.
        lacks=frozenset({"lse", "masked chunks"}),
        chunk_dtypes={"cuda": SIXTEEN_BITS},
    ),
    "flex": Backend(
        "flex",
        "two compiled calls of torch's FlexAttention with V whole",
        devices=("cuda",),
        dtypes=(*SIXTEEN_BITS, torch.float32),
        head_dims=(16, 32, 64, 128),
        library="triton",
        lacks=frozenset({"lse"}) | CHUNKS,
    ),
}

# The first that can run is taken. "triton" is not among them until tests/gpu has passed on a GPU:
# its kernels are proven in the interpreter and by the compiler alone.
AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("blocked",),
    "cuda": ("flash_2call", "flash_4call", "sdpa_4call", "blocked"),
}
# One map with values as wide as its queries is the Transformer twin's: torch's attention is made
# for it.
NARROW_ORDER = ("sdpa_4call", "blocked")


@cache
def importable_libraries() -> frozenset[str]:
    """The optional libraries that are installed, import, have what we call, and know this GPU."""
    return frozenset(name for name in LIBRARIES if _is_usable(name))


def _is_usable(library: str) -> bool:
    if util.find_spec(library) is None:
        return False
    complaint = _complaint(library)
    if complaint is not None:
        logger.warning("%s is installed but not usable: %s", library, complaint)
    return complaint is None


def _complaint(library: str) -> str | None:
    """What keeps an installed library from being used, or None."""
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability < LEAST_CAPABILITY:
            least, found = ("{}.{}".format(*pair) for pair in (LEAST_CAPABILITY, capability))
            return f"it needs a GPU of compute capability {least} or later, this one has {found}"
    if library == "triton":
        return None
    try:
        # A flash library built for another torch or CUDA is found, but does not load.
        load_library(library)
    except (ImportError, OSError, ValueError) as error:
        return str(error)
    return None


def why_not(
    name: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    libraries: frozenset[str],
    needs: frozenset[str] = frozenset(),
) -> str | None:
    """The reason why backend `name` cannot run this, in one clause, or None when it can."""
    backend = BACKENDS[name]
    if backend.devices is not None and device not in backend.devices:
        return f"needs a {' or '.join(backend.devices)} device, got {device}"
    if backend.library is not None and backend.library not in libraries:
        return (
            f"needs the library {backend.library}, which is not installed or not usable (a warning "
            "then says why)"
        )
    if backend.dtypes is not None and dtype not in backend.dtypes:
        return f"takes {', '.join(map(_dtype_name, backend.dtypes))}, got {_dtype_name(dtype)}"
    if backend.head_dims is not None and head_dim not in backend.head_dims:
        return f"takes head_dim {', '.join(map(str, backend.head_dims))}, got {head_dim}"
    if missing := sorted(needs & backend.lacks):
        return f"cannot {' nor '.join(FEATURES[feature] for feature in missing)}"
    in_chunks = backend.chunk_dtypes.get(device, (dtype,))
    if "chunks" in needs and dtype not in in_chunks:
        names = ", ".join(map(_dtype_name, in_chunks))
        return f"takes {names} chunk by chunk on {device}, got {_dtype_name(dtype)}"
    return None


def choose_backend(
    backend: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    libraries: frozenset[str],
    needs: frozenset[str] = frozenset(),
) -> tuple[str, str]:
    """(name, reason) of the backend that computes a call.

    Args:
        backend: a key of `BACKENDS`, or "auto" for the first of `AUTO_ORDER` that can run.
        device: device type, as in `tensor.device.type`.
        dtype: dtype of queries, keys and values.
        head_dim: d, the width of a query.
        libraries: optional libraries at hand, as from `importable_libraries`.
        needs: the `FEATURES` that the call uses.

    Raises:
        ValueError: the name is unknown, or the named backend cannot run this.
    """
    if backend == "auto":
        passed_over: list[str] = []
        order = NARROW_ORDER if "narrow" in needs else AUTO_ORDER.get(device, ("blocked",))
        for name in order:
            reason = why_not(name, device, dtype, head_dim, libraries, needs)
            if reason is None:
                return name, "; ".join([BACKENDS[name].note, *passed_over])
            passed_over.append(f"not {name}: {reason}")
        raise ValueError(f"no attention backend can run on {device}: {'; '.join(passed_over)}")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose auto or {', '.join(BACKENDS)}")
    if reason := why_not(backend, device, dtype, head_dim, libraries, needs):
        raise ValueError(f"backend={backend!r} cannot run: it {reason}")
    return backend, "asked for by name"


@cache
def resolve_backend(
    backend: str,
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    needs: frozenset[str] = frozenset(),
) -> Backend:
    """The chosen backend; the choice and its reason are logged once."""
    libraries = importable_libraries()
    name, reason = choose_backend(backend, device, dtype, head_dim, libraries, needs)
    logger.info(
        "%s attention on %s, %s, d=%d: %s (%s)",
        "softmax" if "narrow" in needs else "differential",
        device,
        _dtype_name(dtype),
        head_dim,
        name,
        reason,
    )
    return BACKENDS[name]


def backend_table(
    device: str | None = None, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128
) -> list[tuple[str, bool, str]]:
    """(name, can run, note or the reason why not) of every backend, for `doctor` to print.

    Args:
        device: device type asked about; the accelerator when there is one, by default.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    libraries = importable_libraries()
    rows = []
    for name, backend in BACKENDS.items():
        reason = why_not(name, device, dtype, head_dim, libraries)
        rows.append((name, reason is None, reason or backend.note))
    return rows


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
