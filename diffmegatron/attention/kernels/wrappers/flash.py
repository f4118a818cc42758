"""Plain attention by FlashAttention 2, or by its fork flex_head_fa, where V may be wider than Q.

Like this package, both align causality bottom-right, return zeros for rows without visible keys,
and group query head n with kv head n // (h / h_kv) (flash_attn 2.8 and flex_head_fa 0.1.2,
flash_attn_interface.py).
"""

import inspect
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..call import AttentionCall
from .two_map_calls import Attend, four_calls, two_calls

ARGUMENTS = {"softmax_scale", "causal", "deterministic"}


def load_library(name: str) -> ModuleType:
    """Import the library, and check that its functions accept our arguments.

    Raises:
        ValueError: the installed version does not accept them.
    """
    library = import_module(name)
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
    """Attend with one map by one call of FlashAttention 2."""
    return plain_attention(load_library("flash_attn"), call)(*call.maps.arguments())


def attend_in_two_calls(call: AttentionCall) -> Tensor:
    """Attend with V whole by flex_head_fa: FlashDiffAttn_1, the form the paper timed."""
    return two_calls(plain_attention(load_library("flex_head_fa"), call), call)


def attend_in_four_calls(call: AttentionCall) -> Tensor:
    """Attend with V in halves by FlashAttention 2: FlashDiffAttn_2."""
    return four_calls(plain_attention(load_library("flash_attn"), call), call)


def plain_attention(library: ModuleType, call: AttentionCall) -> Attend:
    """Return a function of q, k, v (`[b, length, heads, width]`) that attends under the mask.

    Packed documents use the function for variable lengths. All batch rows have the same documents.
    """
    mask = call.mask
    options = {
        "softmax_scale": call.scale,
        "causal": mask.causal,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if mask.cu_seqlens is None:
        return lambda q, k, v: library.flash_attn_func(q, k, v, **options)
    row = torch.tensor(mask.cu_seqlens, dtype=torch.int32)
    longest = int(row.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        starts = torch.arange(q.shape[0], dtype=torch.int32)[:, None] * row[-1]
        bounds = torch.cat([row[:1], (starts + row[1:]).flatten()]).to(q.device)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        out = library.flash_attn_varlen_func(
            *flat,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **options,
        )
        return out.unflatten(0, q.shape[:2])

    return attend
