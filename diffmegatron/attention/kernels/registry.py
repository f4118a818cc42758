"""The table of backends (implementations of attention), with their supported calls and costs.

This module does not import torch, because commands that check or plan a recipe import it and must
start fast. To add a backend, write its module, describe it in `BACKENDS`, and add its name to
`choose_backend.AUTO_ORDER` if `auto` should choose it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal, NamedTuple

from . import costs

if TYPE_CHECKING:
    from torch import Tensor

Op = Literal["differential", "softmax", "subtraction"]

# Operations with their names for messages. "differential" subtracts two attention maps, and its
# values are twice as wide as the queries. "softmax" has one map, and values as wide as the queries.
# "subtraction" is the last step of DIFF V2: signal heads minus lambda times noise heads.
OPS: dict[Op, str] = {
    "differential": "differential attention",
    "softmax": "softmax attention",
    "subtraction": "subtraction of noise heads",
}

LIBRARIES = ("triton", "flash_attn", "flex_head_fa", "cudnn")
# Names of the 16-bit dtypes.
SIXTEEN_BIT_NAMES = ("bfloat16", "float16")

# Features that a call may need beyond causal or unmasked attention over whole sequences. The values
# complete the message "the backend cannot ...". In ring context parallelism a call computes
# attention between a chunk of the sequence's queries and a chunk of its keys.
FEATURES = {
    "documents": "stay within packed documents (cu_seqlens)",
    "offsets": "place queries freely against the keys (query_offset, key_offset)",
    "chunks": "attend to a sequence chunk by chunk",
    "masked chunks": "attend chunk by chunk with masks other than none or a square's diagonal",
}
CHUNKS = frozenset({"chunks", "masked chunks"})


class Call(NamedTuple):
    """Properties of a call that determine, with the installed libraries, the choice of a backend.

    Attributes:
        op: key of `OPS`.
        device: device type, as in `tensor.device.type`.
        dtype: torch's name of the dtype of queries, keys and values ("bfloat16").
        head_dim: d, the width of a query.
        needs: the `FEATURES` that the call uses.
    """

    op: Op
    device: str
    dtype: str
    head_dim: int
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation: the calls that it supports, and its costs.

    Attributes:
        module: module of the package `kernels`, such as "pytorch.blocked", which has the function
            `entry`. If the backend supports "chunks", the module also has the functions
            `attention_with_lse` and `chunk_gradients`.
        note: one clause that describes the backend, shown as the reason of a choice.
        work: function that returns the (forward, backward) multiply-adds of all heads per pair of a
            query and a visible key.
        saved: function that returns the bytes per query saved for the backward pass, in addition to
            q, k, v and the result.
        saves_bias: whether the mask of packed documents is saved for the backward pass. It has one
            number per pair of a query and a key, which all heads share. `saved` excludes it.
        saves_values: whether v itself is saved for the backward pass. If not, copies of v are
            saved, and `saved` includes them.
        saves_result: whether the result (without the headwise norm) is saved for the backward pass.
            `saved` excludes it.
        devices, dtypes, head_dims: supported values; None means any.
        library: name of the required library besides torch, or None.
        computes_hidden_pairs: whether the backend also computes (query, key) pairs that the mask
            hides. Causal attention then needs twice the multiply-adds that `work` implies.
        lacks: unsupported members of `FEATURES`.
        chunk_dtypes: device type -> dtypes supported for a call that needs "chunks". On a device
            type that is missing here, all `dtypes` are supported.
        fuses_norm: whether the backend itself applies the call's norm of the heads' outputs, in its
            kernel if possible.
        is_interpretable: whether the backend also runs in Triton's interpreter, with any device,
            dtype and head_dim.
        entry: name of a function in the module. It maps an `AttentionCall` to the result
            `[b, s, h, e]`, where e is the width of the values. For "subtraction" its arguments are
            the heads and lambda.
    """

    module: str
    note: str
    work: costs.Work
    saved: costs.Saved
    saves_bias: bool = False
    saves_values: bool = True
    saves_result: bool = False
    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    library: str | None = None
    computes_hidden_pairs: bool = False
    lacks: frozenset[str] = frozenset()
    chunk_dtypes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fuses_norm: bool = False
    is_interpretable: bool = False
    entry: str = "attend"

    def load(self) -> ModuleType:
        """Import and return the module of the backend."""
        return import_module(f".{self.module}", __package__)

    def function(self) -> Callable[..., "Tensor"]:
        """Return the function `entry` of the module."""
        function: Callable[..., Tensor] = getattr(self.load(), self.entry)
        return function


# Constructors of `Backend` with the properties that a library's differential and softmax attention
# share. The tables below add the other properties.
_triton_attention = partial(
    Backend,
    "triton.triton_attention",
    saves_result=True,
    devices=("cuda",),
    dtypes=(*SIXTEEN_BIT_NAMES, "float32"),
    head_dims=(64, 96, 128),
    library="triton",
    is_interpretable=True,
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
_torch_attention = partial(
    Backend,
    "wrappers.sdpa",
    saves_bias=True,
    # Chunks need kernels that return log-sum-exps. The only such kernels of torch (flash) support
    # no mask other than the causal one.
    lacks=frozenset({"masked chunks"}),
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
        saved=costs.zero_bytes,
    ),
    "triton": _triton_attention(
        "own fused kernels: 6d forward, 10d or 14d backward",
        work=costs.default_triton_work,
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
        lacks=CHUNKS | {"offsets"},
    ),
    "sdpa_4call": _torch_attention(
        "torch's scaled_dot_product_attention, four calls: 8d forward, 20d backward",
        work=costs.per_head((4, 4), (10, 10)),
        saved=costs.four_calls,
        saves_values=False,
    ),
    "flex": _flex_attention(
        "two compiled calls of torch's FlexAttention with V whole",
        work=costs.per_head((3, 3), (7, 7)),
        saved=costs.two_calls,
    ),
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
        saved=costs.zero_bytes,
    ),
    "triton": _triton_attention(
        "own kernels of differential attention, with one map",
        work=costs.default_triton_work,
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
    "flex": _flex_attention(
        "torch's FlexAttention, compiled",
        work=costs.per_head((2, 0), (5, 0)),
        saved=costs.output_and_log_sum_exps,
    ),
}

# Both backends save only their inputs, the heads and lambda.
SUBTRACTION = {
    "pytorch": Backend(
        "pytorch.subtraction",
        "plain PyTorch",
        work=costs.per_head((0, 0), (0, 0)),
        saved=costs.zero_bytes,
        entry="subtract_noise",
    ),
    "triton": Backend(
        "triton.subtraction_kernel",
        "own fused kernel",
        work=costs.per_head((0, 0), (0, 0)),
        saved=costs.zero_bytes,
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


def whole_sequence_backends(op: Op) -> frozenset[str]:
    """Return the names of the backends without "chunks", which ring attention cannot use."""
    return frozenset(name for name, b in BACKENDS[op].items() if "chunks" in b.lacks)
