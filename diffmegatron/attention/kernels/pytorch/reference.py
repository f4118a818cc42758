"""The paper's equations in plain PyTorch, the reference for all other backends.

Ye et al., Differential Transformer, ICLR 2025 (arXiv 2410.05258), equation 1:

    DiffAttn(X) = (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V

In the shapes b is the batch size, h the number of query heads of a map, s the number of queries, t
the number of keys, and d the width of a query.
"""

import torch
from torch import Tensor

from ..call import AttentionCall
from ..maps import QKV, WholeAttention, map_factors


def attend(call: AttentionCall) -> Tensor:
    """Compute attention from whole score matrices, in the dtype of the inputs."""
    (q1, *q2), (k1, *k2), v = call.maps
    weights = _attention_map(call, q1, k1)
    if call.lambda_ is not None:
        noise = call.lambda_.to(weights.dtype) * _attention_map(call, q2[0], k2[0])
        weights = weights - noise.repeat_interleave(q1.shape[2] // q2[0].shape[2], dim=1)
    return torch.einsum("bhst,bthe->bshe", weights, _repeat_kv(v, q1.shape[2]))


def attention_with_lse(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of one map, for `api.chunk_attention`."""
    dtype = torch.promote_types(call.maps.v.dtype, torch.float32)
    q, k, v = q.to(dtype), k.to(dtype), _repeat_kv(call.maps.v, q.shape[2]).to(dtype)
    scores, empty = _masked_scores(call, q, k)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    out = torch.einsum("bhst,bthe->bshe", weights, v)
    lse = scores.logsumexp(-1).masked_fill(empty.squeeze(-1), -torch.inf)
    return out, lse.transpose(1, 2)


def chunk_gradients(call: AttentionCall, grad: Tensor, whole: WholeAttention) -> QKV:
    """Return the contribution of one chunk of keys to the gradients, for `api.chunk_gradients`.

    The weights of a map are exp(scores - lse), and their gradient is grad v^T. Autograd treats lse
    as a constant here. To include the gradient through lse, the deltas are subtracted from
    grad v^T, as in FlashAttention's backward pass.
    """
    maps, lambda_ = call.maps, call.lambda_
    dtype = torch.promote_types(maps.v.dtype, torch.float32)
    factors = map_factors(lambda_, like=whole.lses[0])
    deltas = whole.deltas(grad, lambda_)
    # In rows without visible keys lse is -inf. Set it to 0, because the gradients of
    # exp(scores - lse) would be NaN.
    lses = [lse.masked_fill(lse == -torch.inf, 0.0) for lse in whole.lses]
    leaves = [x.detach().to(dtype).requires_grad_() for x in (*maps.queries, *maps.keys, maps.v)]
    count = len(maps.queries)
    queries, keys, v = leaves[:count], leaves[count:-1], leaves[-1]
    with torch.enable_grad():
        values = torch.einsum("bshe,bthe->bhst", grad.to(dtype), _repeat_kv(v, grad.shape[2]))
        total = torch.zeros((), dtype=dtype, device=grad.device)
        for q, k, lse, delta, factor in zip(queries, keys, lses, deltas, factors, strict=True):
            scores, empty = _masked_scores(call, q, k)
            weights = (scores - lse.transpose(1, 2)[..., None]).exp().masked_fill(empty, 0.0)
            shared = values.unflatten(1, (q.shape[2], -1)).sum(2)
            of_row = shared - delta.transpose(1, 2)[..., None]
            total = total + (factor * weights * of_row).sum()
    gradients = [g.to(maps.v.dtype) for g in torch.autograd.grad(total, leaves)]
    return QKV(tuple(gradients[:count]), tuple(gradients[count:-1]), gradients[-1])


def _attention_map(call: AttentionCall, q: Tensor, k: Tensor) -> Tensor:
    scores, empty = _masked_scores(call, q, k)
    return scores.softmax(-1).masked_fill(empty, 0.0)


def _masked_scores(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores `[b, h, s, t]`, and a mask `[s, 1]`, True for query rows without visible keys.

    Hidden scores are -inf, except in rows without visible keys, whose softmax would have NaN
    gradients. The caller sets the weights of these rows to zero.
    """
    scores = torch.einsum("bshd,bthd->bhst", q, _repeat_kv(k, q.shape[2])) * call.scale
    mask = call.mask
    hidden = mask.hidden((0, mask.query_length), (0, mask.key_length), q.device)
    if hidden is None:
        return scores, torch.zeros(q.shape[1], 1, dtype=torch.bool, device=q.device)
    empty = hidden.all(-1, keepdim=True)
    return scores.masked_fill(hidden & ~empty, -torch.inf), empty


def _repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    return x.repeat_interleave(num_heads // x.shape[2], dim=2)
