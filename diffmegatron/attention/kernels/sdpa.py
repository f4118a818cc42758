"""torch's scaled_dot_product_attention under our masks: the twin's attention, and four calls."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .masking import AttentionMask
from .two_maps import four_calls


def diff_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    softmax_scale: float,
    mask: AttentionMask,
) -> Tensor:
    """Four calls; shapes as in `diffmegatron.attention.kernels.diff_attention`."""
    hidden = _hidden(mask, q1.device)
    return four_calls(
        lambda q, k, half: _attend(q, k, half, softmax_scale, hidden, mask.causal),
        q1, k1, q2, k2, v, lambda_,
    )  # fmt: skip


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: AttentionMask
) -> Tensor:
    """One call: `[b, s, h, d]`, `[b, t, h_kv, d]` twice `-> [b, s, h, d]`."""
    return _attend(q, k, v, softmax_scale, _hidden(mask, q.device), mask.causal)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, hidden: Tensor | None, causal: bool
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    if hidden is None:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=repeats > 1
        )
        return out.transpose(1, 2)
    if repeats > 1:
        # With a mask and grouped heads CUDA falls to the path that writes out all scores.
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    # A row that sees nothing would be NaN: let it see everything, then make it zero.
    empty = hidden.all(-1, keepdim=True)
    out = scaled_dot_product_attention(q, k, v, attn_mask=~hidden | empty, scale=softmax_scale)
    return out.masked_fill(empty, 0.0).transpose(1, 2)


def _hidden(mask: AttentionMask, device: torch.device) -> Tensor | None:
    """The mask to hand over, or None where `is_causal`, which aligns top-left, says it all."""
    is_square = mask.query_length == mask.key_length and mask.query_offset == mask.key_offset
    if mask.cu_seqlens is None and is_square:
        return None
    return mask.hidden((0, mask.query_length), (0, mask.key_length), device)
