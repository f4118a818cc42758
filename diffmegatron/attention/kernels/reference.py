"""The paper's equations read literally: the yardstick of every other backend.

Ye et al., Differential Transformer, ICLR 2025 (arXiv 2410.05258), equation 1:

    DiffAttn(X) = (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V
"""

import torch
from torch import Tensor

from .masking import AttentionMask


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
    """Whole score matrices, computed in the inputs' own dtype and differentiated by autograd.

    Shapes as in `diffmegatron.attention.kernels.diff_attention`. Memory is O(s t) per head.
    """
    map1 = _attention_map(q1, k1, softmax_scale, mask)
    map2 = _attention_map(q2, k2, softmax_scale, mask)
    combined = map1 - lambda_.to(map1.dtype) * map2
    return torch.einsum("bhst,bthe->bshe", combined, _repeat_kv(v, q1.shape[2]))


def _attention_map(q: Tensor, k: Tensor, softmax_scale: float, mask: AttentionMask) -> Tensor:
    scores = torch.einsum("bshd,bthd->bhst", q, _repeat_kv(k, q.shape[2])) * softmax_scale
    hidden = mask.hidden((0, mask.query_length), (0, mask.key_length), q.device)
    if hidden is None:
        return scores.softmax(-1)
    sees_nothing = hidden.all(-1, keepdim=True)
    return scores.masked_fill(hidden & ~sees_nothing, -torch.inf).softmax(-1) * ~sees_nothing


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)
