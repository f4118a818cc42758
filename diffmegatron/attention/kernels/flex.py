"""Two calls of torch's FlexAttention with V whole, compiled on CUDA."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .masking import AttentionMask
from .two_maps import two_calls


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
    """Shapes as in `diffmegatron.attention.kernels.diff_attention`."""
    start, stop = mask.key_intervals(q1.device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= start[query]) & (key < stop[query])

    block_mask = create_block_mask(
        visible, None, None, mask.query_length, mask.key_length, device=q1.device
    )
    sees_nothing = (start == stop)[:, None, None]
    compute = _flex_attention(q1.device.type)

    def attend(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        out: Tensor = compute(
            q.transpose(1, 2),
            k.transpose(1, 2),
            values.transpose(1, 2),
            block_mask=block_mask,
            scale=softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2).masked_fill(sees_nothing, 0.0)

    return two_calls(attend, q1, k1, q2, k2, v, lambda_)


@cache
def _flex_attention(device: str) -> Any:
    """Compiled on CUDA, since uncompiled it writes out all scores; the CPU has no such kernel."""
    return torch.compile(flex_attention) if device == "cuda" else flex_attention
