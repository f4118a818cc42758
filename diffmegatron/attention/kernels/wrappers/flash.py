"""Attention by calls of FlashAttention 2 or 4, or of the fork flex_head_fa for a V wider than Q.

The libraries (flash_attn 2.8, flex_head_fa 0.1.2, flash-attn-4 4.0.0b36) follow the conventions of
`api.diff_attention`. The last query has the position of the last key, and a query without visible
keys gives zero.
"""

import inspect
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..masks import longest_sequence, sequence_bounds
from ..registry import LIBRARIES
from .two_map_calls import Attend, four_calls, two_calls

ARGUMENTS = {"softmax_scale", "causal", "deterministic", "window_size"}


def load_library(name: str) -> ModuleType:
    """Import a library, and check that its functions have the parameters in `ARGUMENTS`.

    `name` is a key of `registry.LIBRARIES`.
    """
    library = import_module(LIBRARIES[name])
    for function_name in ("flash_attn_func", "flash_attn_varlen_func"):
        function = getattr(library, function_name, None)
        given = set() if function is None else set(inspect.signature(function).parameters)
        if missing := sorted(ARGUMENTS - given):
            version = getattr(library, "__version__", "unknown")
            raise ValueError(
                f"{name} {version} has no {function_name} with {', '.join(missing)}; "
                "it must be FlashAttention 2.4 or later"
            )
    return library


def attend(call: AttentionCall) -> Tensor:
    """Compute softmax attention by one call of FlashAttention 2."""
    return plain_attention(load_library("flash_attn"), call)(*call.maps.arguments())


def attend_by_fa4(call: AttentionCall) -> Tensor:
    """Compute softmax attention by one call of FlashAttention 4."""
    return plain_attention(load_library("flash_attn_4"), call)(*call.maps.arguments())


def attend_by_fa4_in_two_calls(call: AttentionCall) -> Tensor:
    """Compute differential attention by two calls of FlashAttention 4 with the whole V."""
    return two_calls(plain_attention(load_library("flash_attn_4"), call), call)


def attend_in_two_calls(call: AttentionCall) -> Tensor:
    """Compute differential attention by two calls of flex_head_fa with the whole V."""
    return two_calls(plain_attention(load_library("flex_head_fa"), call), call)


def attend_in_four_calls(call: AttentionCall) -> Tensor:
    """Compute differential attention by four calls of FlashAttention 2 with halves of V."""
    return four_calls(plain_attention(load_library("flash_attn"), call), call)


def plain_attention(library: ModuleType, call: AttentionCall) -> Attend:
    """Return a function that computes plain attention of q, k and v with the call's mask."""
    mask = call.mask
    options: dict[str, Any] = {
        "softmax_scale": call.scale,
        "causal": mask.causal,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if mask.window is not None:
        # The numbers of keys that a query sees before and after its own position.
        options["window_size"] = (mask.window - 1, 0)
    if mask.cu_seqlens is None:
        return lambda q, k, v: _output(library.flash_attn_func(q, k, v, **options))
    bounds = sequence_bounds(mask.cu_seqlens, call.maps.v.shape[0], call.maps.v.device)
    longest = longest_sequence(mask.cu_seqlens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        found = library.flash_attn_varlen_func(
            *flat,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return _output(found).unflatten(0, q.shape[:2])

    return attend


def _output(found: Tensor | tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the output; FlashAttention 4 returns (output, log-sum-exp or None)."""
    return found[0] if isinstance(found, tuple) else found
