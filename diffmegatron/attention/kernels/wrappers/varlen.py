"""Attention by torch's `varlen_attn`: FlashAttention 2, or 3 or 4 by torch's own switch.

`varlen_attn` takes sequences of any lengths, one after the other, so it needs no mask tensor for
packed documents. The last query has the position of the last key, and a query without visible keys
gives zero. It needs values as wide as queries, so differential attention takes four calls.

torch's switch `activate_flash_attention_impl` applies to the whole process. It registers the
kernels of an installed library: FlashAttention 3 (`flash_attn_interface`) or 4 (`flash_attn.cute`).
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from ..call import AttentionCall
from ..masks import longest_sequence, sequence_bounds
from .two_map_calls import Attend, four_calls

# Parameters of varlen_attn that this module uses. torch 2.10 lacks some of them.
ARGUMENTS = {"scale", "window_size", "enable_gqa"}


def check_torch() -> None:
    """Raise ImportError if torch's `varlen_attn` lacks parameters in `ARGUMENTS`."""
    from torch.nn.attention.varlen import varlen_attn

    if missing := sorted(ARGUMENTS - set(inspect.signature(varlen_attn).parameters)):
        raise ImportError(f"varlen_attn of torch {torch.__version__} lacks {', '.join(missing)}")


def use_flash_attention(implementation: str | None) -> None:
    """Switch torch's flash kernels, in this process, to "FA3", "FA4" or its own (None)."""
    if not hasattr(attention, "activate_flash_attention_impl"):
        if implementation is not None:
            raise ImportError(f"torch {torch.__version__} has no switch to {implementation}")
        return
    if attention.current_flash_attention_impl() == implementation:
        return
    if implementation is None:
        attention.restore_flash_attention_impl()
    else:
        attention.activate_flash_attention_impl(implementation)


def attend(call: AttentionCall, implementation: str | None = None) -> Tensor:
    """Compute softmax attention by one call, or differential attention by four calls."""
    attend_map = _plain_attention(call, implementation)
    if call.lambda_ is None:
        return attend_map(*call.maps.arguments())
    return four_calls(attend_map, call)


attend_by_fa3 = partial(attend, implementation="FA3")
attend_by_fa4 = partial(attend, implementation="FA4")


def _plain_attention(call: AttentionCall, implementation: str | None) -> Attend:
    """Return a function that computes plain attention of q, k and v with the call's mask."""
    from torch.nn.attention.varlen import varlen_attn

    mask = call.mask
    # A batch row without packed documents is one sequence.
    row = mask.cu_seqlens or (0, mask.query_length)
    key_row = mask.cu_seqlens or (0, mask.key_length)
    batch, device = call.maps.v.shape[0], call.maps.v.device
    bounds, key_bounds = (sequence_bounds(each, batch, device) for each in (row, key_row))
    longest, longest_keys = longest_sequence(row), longest_sequence(key_row)
    # The numbers of keys that a query sees before and after its own position; -1 means all.
    before = -1 if mask.window is None else mask.window - 1

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        use_flash_attention(implementation)
        out = varlen_attn(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            bounds,
            key_bounds,
            longest,
            longest_keys,
            scale=call.scale,
            window_size=(before, 0 if mask.causal else -1),
            enable_gqa=q.shape[2] != k.shape[2],
        )
        kept: Tensor = KeptImplementation.apply(implementation, out)
        return kept.unflatten(0, q.shape[:2])

    return attend


class KeptImplementation(torch.autograd.Function):
    """The identity; its backward pass switches to the implementation of the forward pass.

    The gradient of the attention follows it in the backward pass. Other layers may have switched
    to another implementation in between.
    """

    @staticmethod
    def forward(ctx: Any, implementation: str | None, out: Tensor) -> Tensor:
        """Return the output."""
        ctx.implementation = implementation
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        """Return the output's gradient after the switch."""
        use_flash_attention(ctx.implementation)
        return None, grad
