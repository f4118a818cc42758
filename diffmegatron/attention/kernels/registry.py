"""The tables of backends (implementations of an operation), and the choice of one for a call.

This module does not import torch, so that commands which check or plan a recipe start fast.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

from . import costs
from .configuration import Configuration

Op = Literal["differential", "softmax", "subtraction"]
# Operations that compute the attention of a layer.
Operation = Literal["differential", "softmax"]
ContextCommunication = Literal["ring", "all_gather", "ulysses"]

# Operations with their names for messages. "differential" subtracts two attention maps, and its
# values are twice as wide as the queries. "subtraction" is the last step of DIFF V2.
OPS: dict[Op, str] = {
    "differential": "differential attention",
    "softmax": "softmax attention",
    "subtraction": "subtraction of noise heads",
}

# Optional libraries, each with the module that is imported. "varlen_attn" is a function of torch.
LIBRARIES = {
    "triton": "triton",
    "flash_attn": "flash_attn",
    "flex_head_fa": "flex_head_fa",
    "cudnn": "cudnn",
    "varlen_attn": "torch.nn.attention.varlen",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
}
SIXTEEN_BIT_NAMES = ("bfloat16", "float16")

# Features that a call may need in addition to causal or unmasked attention over whole sequences.
# Each value completes the message "the backend cannot ...".
FEATURES = {
    "documents": "stay within packed documents (cu_seqlens)",
    "windows": "limit queries to a window of keys (window)",
    "offsets": "place queries freely against the keys (query_offset, key_offset)",
    "chunks": "attend to a sequence chunk by chunk",
    "masked chunks": "attend chunk by chunk with masks other than none or a square's diagonal",
}
CHUNKS = frozenset({"chunks", "masked chunks"})


class Call(NamedTuple):
    """Properties of a call that determine, with the installed libraries, the choice of a backend.

    `device` is a device type, `dtype` torch's name of the queries' dtype (e.g. "bfloat16"),
    `head_dim` the width of a query, and `needs` has keys of `FEATURES`. `chip` is the major compute
    capability of the GPU, e.g. 9 for Hopper; None on other devices, or if it is unknown.
    """

    op: Op
    device: str
    dtype: str
    head_dim: int
    needs: frozenset[str] = frozenset()
    chip: int | None = None


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation: the calls that it supports, and its costs.

    Attributes:
        module: module of the package `kernels`, e.g. "pytorch.blocked". If the backend supports
            "chunks", the module has the functions `attention_with_lse` and `chunk_gradients`.
        note: one clause that describes the backend, for logs and tables.
        work, saved: functions that compute the multiply-adds and the saved bytes; see `costs`.
        saves_bias: whether the backward pass needs a mask tensor for packed documents or offsets.
            The mask has one number per (query, key) pair, and all heads share it.
        saves_values: whether the backward pass needs v itself. If not, `saved` counts the copies of
            v that the backward pass needs.
        saves_result: whether the backward pass needs the result before any headwise norm.
        devices, dtypes, head_dims: supported values; None means any.
        dtype_head_dims: dtype -> supported values of head_dim, if these are not `head_dims`.
        chips: major compute capability -> largest supported `head_dim`; empty means that all GPUs
            support all `head_dims`.
        library: key of `LIBRARIES`, the required library, or None.
        computes_hidden_pairs: whether the backend computes (query, key) pairs that the mask hides.
        lacks: unsupported keys of `FEATURES`.
        chunk_dtypes: device type -> dtypes supported for "chunks". Other device types
            support all `dtypes`.
        fuses_norm: whether the backend itself applies the headwise norm.
        is_interpretable: whether the backend can run in Triton's interpreter, where `devices`,
            `dtypes` and `head_dims` do not apply.
        entry: name of the module's function that computes the result. Its argument is an
            `AttentionCall`; for "subtraction" its arguments are heads, lambda and `sigmoid`.
        configuration: configuration of the kernels, if the backend has several.
    """

    module: str
    note: str
    work: costs.Work
    saved: costs.Saved = costs.zero_bytes
    saves_bias: bool = False
    saves_values: bool = True
    saves_result: bool = False
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    dtype_head_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    chips: Mapping[int, int] = field(default_factory=dict)
    library: str | None = None
    computes_hidden_pairs: bool = False
    lacks: frozenset[str] = frozenset()
    chunk_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fuses_norm: bool = False
    is_interpretable: bool = False
    entry: str = "attend"
    configuration: Configuration | None = None

    def load(self) -> ModuleType:
        """Import and return the module of the backend."""
        return import_module(f".{self.module}", __package__)

    def function(self, name: str = "") -> Callable[..., Any]:
        """Return a function of the module, by default `entry`, with the configuration."""
        function: Callable[..., Any] = getattr(self.load(), name or self.entry)
        configured = self.configuration
        return function if configured is None else partial(function, configuration=configured)


# Arguments that the differential and the softmax backend of a library have in common.
_triton_attention = partial(
    Backend,
    "triton.triton_attention",
    saves_result=True,
    devices=("cuda",),
    dtypes=(*SIXTEEN_BIT_NAMES, "float32"),
    head_dims=(64, 80, 96, 112, 128, 192, 256),
    dtype_head_dims={"float32": (64, 80, 96, 112, 128)},
    library="triton",
    is_interpretable=True,
    configuration=Configuration(),
)
_flash_attention = partial(
    Backend,
    "wrappers.flash",
    devices=("cuda",),
    dtypes=SIXTEEN_BIT_NAMES,
    head_dims=tuple(range(8, 257, 8)),
    library="flash_attn",
    lacks=CHUNKS | {"offsets"},
)
_flex_attention = partial(
    Backend,
    "wrappers.flex",
    devices=("cuda",),
    dtypes=(*SIXTEEN_BIT_NAMES, "float32"),
    head_dims=(16, 32, 64, 128),
    library="triton",
    lacks=CHUNKS,
)
# torch's varlen_attn calls FlashAttention 2, or by torch's switch 3 (Hopper) or 4 (Hopper and
# Blackwell). In FlashAttention 4, only Hopper supports all widths, and it is not known which of its
# versions compute the gradients of windows.
HOPPER, BLACKWELL = 9, 10
_varlen_attention = partial(
    Backend,
    "wrappers.varlen",
    devices=("cuda",),
    dtypes=SIXTEEN_BIT_NAMES,
    head_dims=tuple(range(8, 257, 8)),
    lacks=CHUNKS | {"offsets"},
)
_varlen_attentions = {
    "varlen": partial(_varlen_attention, library="varlen_attn"),
    "varlen_fa3": partial(
        _varlen_attention, library="flash_attn_3", chips={HOPPER: 256}, entry="attend_by_fa3"
    ),
    "varlen_fa4": partial(
        _varlen_attention,
        library="flash_attn_4",
        chips={HOPPER: 256, BLACKWELL: 128},
        lacks=CHUNKS | {"offsets", "windows"},
        entry="attend_by_fa4",
    ),
}
_IMPLEMENTATION_NAMES = ("", " by FlashAttention 3", " by FlashAttention 4")
_flash_attention_4 = partial(
    Backend,
    "wrappers.flash",
    devices=("cuda",),
    dtypes=SIXTEEN_BIT_NAMES,
    library="flash_attn_4",
    lacks=CHUNKS | {"offsets", "windows"},
)
_torch_attention = partial(
    Backend,
    "wrappers.sdpa",
    saves_bias=True,
    # Chunks use torch's flash kernels. On CUDA their only mask is `is_causal`. A window would need
    # a mask tensor with a number for every pair of tokens.
    lacks=frozenset({"masked chunks", "windows"}),
    chunk_dtypes={"cuda": SIXTEEN_BIT_NAMES},
)

DIFFERENTIAL = {
    "reference": Backend(
        "pytorch.reference",
        "the paper's equations read literally, for tests",
        work=costs.per_head((3, 1), (6, 2)),
        saved=costs.reference_saved,
        computes_hidden_pairs=True,
    ),
    "blocked": Backend(
        "pytorch.blocked",
        "row blocks in plain PyTorch, deterministic",
        work=costs.per_head((3, 1), (7, 3)),
    ),
    "triton": _triton_attention(
        "own fused kernels: 6d forward, 10d or 14d backward",
        work=costs.triton_work,
        saved=costs.fused,
        fuses_norm=True,
    ),
    "flash_2call": Backend(
        "wrappers.flash",
        "two calls of flex_head_fa with V whole: 6d forward, 14d backward",
        work=costs.per_head((3, 3), (7, 7)),
        saved=costs.two_calls,
        devices=("cuda",),
        dtypes=SIXTEEN_BIT_NAMES,
        head_dims=(32, 64, 96, 128),
        library="flex_head_fa",
        entry="attend_in_two_calls",
        lacks=CHUNKS | {"offsets"},
    ),
    "flash_4call": _flash_attention(
        "four calls of FlashAttention 2: 8d forward, 20d backward",
        work=costs.per_head((4, 4), (10, 10)),
        saved=costs.four_calls,
        saves_values=False,
        entry="attend_in_four_calls",
    ),
    "cudnn_2call": Backend(
        "wrappers.cudnn_graphs",
        "two calls of cuDNN's attention with V whole: 6d forward, 14d backward",
        work=costs.per_head((3, 3), (7, 7)),
        saved=costs.two_calls,
        devices=("cuda",),
        dtypes=SIXTEEN_BIT_NAMES,
        head_dims=tuple(range(8, 129, 8)),
        library="cudnn",
        lacks=CHUNKS | {"offsets", "windows"},
    ),
    "sdpa_4call": _torch_attention(
        "torch's scaled_dot_product_attention, four calls: 8d forward, 20d backward",
        work=costs.per_head((4, 4), (10, 10)),
        saved=costs.four_calls,
        saves_values=False,
    ),
    "flash4_2call": _flash_attention_4(
        "two calls of FlashAttention 4 with V whole: 6d forward, 14d backward",
        work=costs.per_head((3, 3), (7, 7)),
        saved=costs.two_calls,
        head_dims=tuple(range(8, 129, 8)),
        chips={HOPPER: 128, BLACKWELL: 64},
        entry="attend_by_fa4_in_two_calls",
    ),
    "flex": _flex_attention(
        "two compiled calls of torch's FlexAttention with V whole",
        work=costs.per_head((3, 3), (7, 7)),
        saved=costs.two_calls,
    ),
}
DIFFERENTIAL |= {
    name: backend(
        f"torch's varlen_attn{by}, four calls: 8d forward, 20d backward",
        work=costs.per_head((4, 4), (10, 10)),
        saved=costs.four_calls,
        saves_values=False,
    )
    for (name, backend), by in zip(_varlen_attentions.items(), _IMPLEMENTATION_NAMES, strict=True)
}

SOFTMAX = {
    "reference": Backend(
        "pytorch.reference",
        "the equation read literally, for tests",
        work=costs.per_head((2, 0), (4, 0)),
        saved=costs.reference_saved,
        computes_hidden_pairs=True,
    ),
    "blocked": Backend(
        "pytorch.blocked",
        "row blocks in plain PyTorch, deterministic",
        work=costs.per_head((2, 0), (5, 0)),
    ),
    "triton": _triton_attention(
        "own kernels of differential attention, with one map",
        work=costs.triton_work,
        saved=costs.log_sum_exps,
    ),
    "sdpa": _torch_attention(
        "torch's scaled_dot_product_attention",
        work=costs.per_head((2, 0), (5, 0)),
        saved=costs.log_sum_exps,
        saves_result=True,
    ),
    "flash_attn": _flash_attention(
        "FlashAttention 2",
        work=costs.per_head((2, 0), (5, 0)),
        saved=costs.log_sum_exps,
        saves_result=True,
    ),
    "flash4": _flash_attention_4(
        "FlashAttention 4",
        work=costs.per_head((2, 0), (5, 0)),
        saved=costs.log_sum_exps,
        saves_result=True,
        head_dims=tuple(range(8, 257, 8)),
        chips={HOPPER: 256, BLACKWELL: 128},
        entry="attend_by_fa4",
    ),
    "flex": _flex_attention(
        "torch's FlexAttention, compiled",
        work=costs.per_head((2, 0), (5, 0)),
        saved=costs.output_and_log_sum_exps,
    ),
}
SOFTMAX |= {
    name: backend(
        f"torch's varlen_attn{by}",
        work=costs.per_head((2, 0), (5, 0)),
        saved=costs.log_sum_exps,
        saves_result=True,
    )
    for (name, backend), by in zip(_varlen_attentions.items(), _IMPLEMENTATION_NAMES, strict=True)
}

SUBTRACTION = {
    "pytorch": Backend(
        "pytorch.subtraction",
        "plain PyTorch",
        work=costs.per_head((0, 0), (0, 0)),
        entry="subtract_noise",
    ),
    "triton": Backend(
        "triton.subtraction_kernel",
        "own fused kernel",
        work=costs.per_head((0, 0), (0, 0)),
        entry="subtract_noise",
        devices=("cuda",),
        dtypes=(*SIXTEEN_BIT_NAMES, "float32", "float64"),
        library="triton",
        is_interpretable=True,
    ),
}

BACKENDS: dict[Op, dict[str, Backend]] = {
    "differential": DIFFERENTIAL,
    "softmax": SOFTMAX,
    "subtraction": SUBTRACTION,
}


# Backends in the order in which "auto" tries them, by operation and device type. This package's own
# attention kernels ("triton") and cuDNN graphs ("cudnn_2call") have never run on a GPU. "triton"
# therefore follows the libraries, and "cudnn_2call" is missing. "blocked" is slow, so it is last.
AUTO_ORDER: dict[Op, dict[str, tuple[str, ...]]] = {
    "differential": {
        "cpu": ("blocked",),
        "cuda": ("flash_2call", "flash_4call", "sdpa_4call", "triton", "blocked"),
    },
    "softmax": {"cpu": ("sdpa", "blocked"), "cuda": ("sdpa", "flash_attn", "triton", "blocked")},
    "subtraction": {"cpu": ("pytorch",), "cuda": ("triton", "pytorch")},
}


def find_backend(op: Op, name: str) -> Backend | None:
    """Return an operation's backend with this name, which may have a configuration, or None."""
    base, colon, text = name.partition(":")
    backend = BACKENDS[op].get(base)
    if backend is None or not colon:
        return backend
    try:
        configuration = Configuration.parse(text)
    except ValueError:
        return None
    if backend.configuration is None:
        return None
    work = partial(costs.triton_work, one_pass=configuration.one_pass)
    return replace(backend, configuration=configuration, work=work)


def known_backend(op: Op, name: str) -> Backend:
    """Return an operation's backend with this name.

    Raises:
        ValueError: there is none.
    """
    found = find_backend(op, name)
    if found is None:
        names = ", ".join(BACKENDS[op])
        raise ValueError(f"backend={name!r} is unknown; choose auto or {names}")
    return found


def base_name(name: str) -> str:
    """Return a backend's name without its configuration."""
    return name.partition(":")[0]


def subtraction_backend(attention_backend: str) -> str:
    """Return the backend of DIFF V2's subtraction that goes with a backend of its attention.

    The plain PyTorch backends of attention have PyTorch's subtraction, and "triton" has Triton's.
    With any other backend of attention, the choice is "auto".
    """
    pairs = {"reference": "pytorch", "blocked": "pytorch", "triton": "triton"}
    return pairs.get(base_name(attention_backend), "auto")


def whole_sequence_backends(op: Op) -> frozenset[str]:
    """Return the names of the backends that lack "chunks"; ring attention cannot use them."""
    return frozenset(name for name, b in BACKENDS[op].items() if "chunks" in b.lacks)


def needed_features(
    *, documents: bool, windows: bool, context: int, communication: ContextCommunication | None
) -> frozenset[str]:
    """Return the keys of `FEATURES` that a parallel layout needs.

    `documents` is true if attention stays within packed documents, and `windows` if a window hides
    tokens of a sequence. `context` is the number of context-parallel ranks. `communication` is
    "ring", "all_gather", "ulysses" or None.
    """
    needs = {"documents"} if documents else set()
    if windows:
        needs.add("windows")
    if context > 1 and communication == "ring":
        needs |= {"chunks", "masked chunks", "offsets"} if needs else {"chunks"}
    if context > 1 and communication == "all_gather" and documents:
        needs.add("offsets")
    return frozenset(needs)


def why_not(name: str, call: Call, libraries: frozenset[str]) -> str | None:
    """Return the reason why a backend cannot compute a call, or None if it can.

    The reason is a clause without a subject, e.g. "needs a cuda device, got cpu". `libraries` are
    the usable optional libraries.
    """
    backend = known_backend(call.op, name)
    # Triton's interpreter runs on the CPU, without the limits of the GPU kernels.
    if backend.is_interpretable and os.environ.get("TRITON_INTERPRET") == "1":
        backend = replace(backend, devices=None, dtypes=None, head_dims=None, dtype_head_dims={})
    if backend.devices is not None and call.device not in backend.devices:
        return f"needs a {' or '.join(backend.devices)} device, got {call.device}"
    if backend.library is not None and backend.library not in libraries:
        return (
            f"needs the library {backend.library}, which is not installed or not usable (a warning "
            "then says why)"
        )
    if backend.dtypes is not None and call.dtype not in backend.dtypes:
        return f"takes {', '.join(backend.dtypes)}, got {call.dtype}"
    widths = backend.dtype_head_dims.get(call.dtype, backend.head_dims)
    if widths is not None and call.head_dim not in widths:
        of_dtype = f" in {call.dtype}" if call.dtype in backend.dtype_head_dims else ""
        return f"takes head_dim {', '.join(map(str, widths))}{of_dtype}, got {call.head_dim}"
    if backend.chips and call.chip is not None:
        if call.chip not in backend.chips:
            names = " or ".join(f"{chip}.x" for chip in backend.chips)
            return f"needs compute capability {names}, got {call.chip}.x"
        if call.head_dim > (largest := backend.chips[call.chip]):
            return (
                f"takes head_dim up to {largest} on compute capability {call.chip}.x, got "
                f"{call.head_dim}"
            )
    if missing := sorted(call.needs & backend.lacks):
        return f"cannot {' nor '.join(FEATURES[feature] for feature in missing)}"
    in_chunks = backend.chunk_dtypes.get(call.device, (call.dtype,))
    if "chunks" in call.needs and call.dtype not in in_chunks:
        names = ", ".join(in_chunks)
        return f"takes {names} chunk by chunk on {call.device}, got {call.dtype}"
    return None


def choose_backend(
    backend: str, call: Call, libraries: frozenset[str], wrong: frozenset[str] = frozenset()
) -> tuple[str, str]:
    """Return the name of the backend that computes a call, and the reason for the choice.

    `backend` is a key of `BACKENDS[call.op]`, or "auto" for the first of `AUTO_ORDER` that can run.
    `libraries` are the usable optional libraries. "auto" passes over the backends in `wrong`, whose
    results were measured to be wrong on this machine.

    Raises:
        ValueError: the named backend is unknown or cannot run the call, or "auto" finds none.
    """
    known = BACKENDS[call.op]
    if backend == "auto":
        passed_over: list[str] = []
        orders = AUTO_ORDER[call.op]
        for name in orders.get(call.device, orders["cpu"]):
            reason = why_not(name, call, libraries)
            if name in wrong:
                reason = "is wrong on this machine"
            if reason is None:
                return name, "; ".join([known[name].note, *passed_over])
            passed_over.append(f"not {name}: {reason}")
        raise ValueError(f"no attention backend can run on {call.device}: {'; '.join(passed_over)}")
    if reason := why_not(backend, call, libraries):
        raise ValueError(f"backend={backend!r} cannot run: it {reason}")
    return backend, "requested by name"
