"""The paper's equations read literally: the reference of every other backend.

Ye et al., Differential Transformer, ICLR 2025 (arXiv 2410.05258), equation 1:

    DiffAttn(X) = (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V
"""

import torch
from torch import Tensor

from ..maps import QKV, WholeAttention, map_factors
from ..masks import AttentionMask


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

    Shapes as in `api.diff_attention`. Memory is O(s t) per head.
    """
    map1 = _attention_map(q1, k1, softmax_scale, mask)
    map2 = _attention_map(q2, k2, softmax_scale, mask)
    repeats = q1.shape[2] // q2.shape[2]
    combined = map1 - (lambda_.to(map1.dtype) * map2).repeat_interleave(repeats, dim=1)
    return torch.einsum("bhst,bthe->bshe", combined, _repeat_kv(v, q1.shape[2]))


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: AttentionMask
) -> Tensor:
    """As `diff_attention`, of one map: `[b, s, h, d]`, `[b, t, h_kv, d]` twice."""
    weights = _attention_map(q, k, softmax_scale, mask)
    return torch.einsum("bhst,bthe->bshe", weights, _repeat_kv(v, q.shape[2]))


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """One map's part in `api.chunk_attention`, of values of any width."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), _repeat_kv(v, q.shape[2]).to(dtype)
    weights = _attention_map(q, k, softmax_scale, mask)
    out = torch.einsum("bhst,bthe->bshe", weights, v)
    return out, _log_sum_exp(q, k, softmax_scale, mask)


def chunk_gradients(
    grad: Tensor,
    maps: QKV,
    lambda_: Tensor | None,
    whole: WholeAttention,
    *,
    softmax_scale: float,
    mask: AttentionMask,
) -> QKV:
    """As `api.chunk_gradients`, by autograd through the weights.

    The log-sum-exp of the whole is a constant of the chunk; what it would have carried is the row
    sum D, which is subtracted.
    """
    dtype = torch.promote_types(maps.v.dtype, torch.float32)
    factors = map_factors(lambda_, like=whole.lses[0])
    deltas = whole.deltas(grad, lambda_)
    # Rows that see no key anywhere: exp of their -inf would be inf, and NaN in the gradients.
    lses = [lse.masked_fill(lse == -torch.inf, 0.0) for lse in whole.lses]
    leaves = [x.detach().to(dtype).requires_grad_() for x in (*maps.queries, *maps.keys, maps.v)]
    count = len(maps.queries)
    queries, keys, v = leaves[:count], leaves[count:-1], leaves[-1]
    with torch.enable_grad():
        values = torch.einsum("bshe,bthe->bhst", grad.to(dtype), _repeat_kv(v, grad.shape[2]))
        total = torch.zeros((), dtype=dtype, device=grad.device)
        for q, k, lse, delta, factor in zip(queries, keys, lses, deltas, factors, strict=True):
            scores, empty = _masked_scores(q, k, softmax_scale, mask)
            weights = (scores - lse.transpose(1, 2)[..., None]).exp().masked_fill(empty, 0.0)
            shared = values.unflatten(1, (q.shape[2], -1)).sum(2)
            of_row = shared - delta.transpose(1, 2)[..., None]
            total = total + (factor * weights * of_row).sum()
    gradients = [g.to(maps.v.dtype) for g in torch.autograd.grad(total, leaves)]
    return QKV(tuple(gradients[:count]), tuple(gradients[count:-1]), gradients[-1])


def _attention_map(q: Tensor, k: Tensor, softmax_scale: float, mask: AttentionMask) -> Tensor:
    scores, empty = _masked_scores(q, k, softmax_scale, mask)
    return scores.softmax(-1).masked_fill(empty, 0.0)


def _log_sum_exp(q: Tensor, k: Tensor, softmax_scale: float, mask: AttentionMask) -> Tensor:
    scores, empty = _masked_scores(q, k, softmax_scale, mask)
    return scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf).transpose(1, 2)


def _masked_scores(
    q: Tensor, k: Tensor, softmax_scale: float, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """Scores `[b, h, s, t]` with -inf where hidden, and which rows `[s, 1]` see no key.

    Those rows keep finite scores, so that their softmax has a gradient to throw away.
    """
    scores = torch.einsum("bshd,bthd->bhst", q, _repeat_kv(k, q.shape[2])) * softmax_scale
    hidden = mask.hidden((0, mask.query_length), (0, mask.key_length), q.device)
    if hidden is None:
        return scores, torch.zeros(q.shape[1], 1, dtype=torch.bool, device=q.device)
    empty = hidden.all(-1, keepdim=True)
    return scores.masked_fill(hidden & ~empty, -torch.inf), empty


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)
