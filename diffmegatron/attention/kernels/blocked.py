"""Differential attention in blocks of query rows, in plain PyTorch: the CPU backend.

One block holds both score matrices of a few query rows against all the keys they see. Both maps
are normalised and subtracted before they meet V, so the forward costs 4d multiply-adds per
(query, key) pair and the backward 10d, as much as a plain Transformer of equal size: dP = dO V^T is
shared by the maps and dV = (P1 - lambda P2)^T dO is one product. Only the inputs are saved; the
backward computes the maps again. With D_i = rowsum(P_i * dP):

    dS1 = P1 * (dP - D1)    dS2 = -lambda P2 * (dP - D2)    dlambda = -sum(D2)
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .masking import AttentionMask

# 128 rows x 1K-4K keys x fp32 fit a core's L2 cache; 64 and 256 measured 5-10% slower, 512 30%.
ROWS_PER_BLOCK = 128


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
    """Shapes as in `diffmegatron.attention.kernels.diff_attention`.

    16-bit inputs are computed in fp32 and the result rounded once. Bit-deterministic for a fixed
    number of threads.
    """
    out: Tensor = _BlockedDiffAttention.apply(q1, k1, q2, k2, v, lambda_, softmax_scale, mask)
    return out


class _BlockedDiffAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q1: Tensor,
        k1: Tensor,
        q2: Tensor,
        k2: Tensor,
        v: Tensor,
        lambda_: Tensor,
        softmax_scale: float,
        mask: AttentionMask,
    ) -> Tensor:
        ctx.save_for_backward(q1, k1, q2, k2, v, lambda_)
        ctx.softmax_scale, ctx.mask = softmax_scale, mask
        with torch.autocast(q1.device.type, enabled=False):
            kv_heads = k1.shape[2]
            q1_, q2_ = (_group_queries(q, kv_heads) * softmax_scale for q in (q1, q2))
            k1_, k2_, v_ = (_group_keys(x) for x in (k1, k2, v))
            weight = lambda_.to(v_.dtype)
            out = v_.new_zeros(*q1_.shape[:3], v_.shape[-1])
            for heads, rows, keys in _blocks(q1_, mask):
                map1 = _attention_map(q1_[heads, :, rows], k1_[heads, keys], mask, rows, keys)
                map2 = _attention_map(q2_[heads, :, rows], k2_[heads, keys], mask, rows, keys)
                product = map1.sub_(map2.mul_(weight)) @ v_[heads, keys]
                out[heads, :, rows] = product.view_as(out[heads, :, rows])
            return _ungroup_queries(out, v.shape[0]).to(v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # read once: activation checkpointing refuses a second read
        q1, k1, q2, k2, v, lambda_ = inputs
        mask, softmax_scale = ctx.mask, ctx.softmax_scale
        with torch.autocast(q1.device.type, enabled=False):
            batch, kv_heads = v.shape[0], v.shape[2]
            q1_, q2_ = (_group_queries(q, kv_heads) * softmax_scale for q in (q1, q2))
            k1_, k2_, v_ = (_group_keys(x) for x in (k1, k2, v))
            grad_out_ = _group_queries(grad_out, kv_heads)
            weight = lambda_.to(v_.dtype)
            dq1, dq2, dk1, dk2, dv = (torch.zeros_like(x) for x in (q1_, q2_, k1_, k2_, v_))
            dlambda = torch.zeros_like(weight)
            for heads, rows, keys in _blocks(q1_, mask):
                map1 = _attention_map(q1_[heads, :, rows], k1_[heads, keys], mask, rows, keys)
                map2 = _attention_map(q2_[heads, :, rows], k2_[heads, keys], mask, rows, keys)
                dout = grad_out_[heads, :, rows].flatten(1, 2)
                dmap = dout @ v_[heads, keys].mT
                dv[heads, keys].baddbmm_((map1 - map2 * weight).mT, dout)
                dscores1, _ = _softmax_backward(map1, dmap)
                dscores2, row_sums2 = _softmax_backward(map2, dmap)
                dlambda -= row_sums2.sum()
                dscores2.mul_(-weight)
                for dscores, q, k, dq, dk in (
                    (dscores1, q1_, k1_, dq1, dk1),
                    (dscores2, q2_, k2_, dq2, dk2),
                ):
                    product = dscores @ k[heads, keys]
                    dq[heads, :, rows] = product.view_as(dq[heads, :, rows])
                    dk[heads, keys].baddbmm_(dscores.mT, q[heads, :, rows].flatten(1, 2))
            dq1, dq2 = (_ungroup_queries(dq * softmax_scale, batch) for dq in (dq1, dq2))
            dk1, dk2, dv = (_ungroup_keys(x, batch) for x in (dk1, dk2, dv))
        grads = zip((dq1, dk1, dq2, dk2, dv, dlambda), inputs, strict=True)
        return (*(grad.to(x.dtype) for grad, x in grads), None, None)


def _blocks(q: Tensor, mask: AttentionMask) -> Iterator[tuple[slice, slice, slice]]:
    """(heads, query rows, keys they see) of each block; blocks that see no key are left out.

    On CPU a block is one kv head per thread, so that each core's share stays in its cache;
    elsewhere it is all of them, so that launches are few.
    """
    groups, repeats, length = q.shape[:3]
    heads_per_block = torch.get_num_threads() if q.device.type == "cpu" else groups
    rows_per_block = max(ROWS_PER_BLOCK // repeats, 16)
    for head in range(0, groups, heads_per_block):
        for start in range(0, length, rows_per_block):
            stop = min(start + rows_per_block, length)
            key_start, key_stop = mask.key_range(start, stop)
            if key_start < key_stop:
                yield (
                    slice(head, min(head + heads_per_block, groups)),
                    slice(start, stop),
                    slice(key_start, key_stop),
                )


def _attention_map(q: Tensor, k: Tensor, mask: AttentionMask, rows: slice, keys: slice) -> Tensor:
    """softmax(q k^T): `[heads, repeats, rows, d], [heads, keys, d] -> [heads, repeats*rows, keys]`.

    A row that sees no key gets zeros.
    """
    scores = q.flatten(1, 2) @ k.mT
    prefix = mask.unmasked_prefix(rows.start, rows.stop)
    if prefix == scores.shape[-1]:
        return scores.softmax(-1)
    hidden = mask.hidden((rows.start, rows.stop), (keys.start + prefix, keys.stop), q.device)
    assert hidden is not None
    by_row = scores.unflatten(1, (q.shape[1], q.shape[2]))
    by_row[..., prefix:].masked_fill_(hidden, -torch.inf)
    attention_map = scores.softmax(-1)
    if prefix == 0 and bool((sees_nothing := hidden.all(-1, keepdim=True)).any()):
        attention_map.view_as(by_row).masked_fill_(sees_nothing, 0.0)
    return attention_map


def _softmax_backward(attention_map: Tensor, dmap: Tensor) -> tuple[Tensor, Tensor]:
    """(dS, D) with D = rowsum(P * dP) and dS = P * (dP - D)."""
    product = attention_map * dmap
    row_sums = product.sum(-1, keepdim=True)
    return product.addcmul_(attention_map, row_sums, value=-1.0), row_sums


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _group_queries(x: Tensor, kv_heads: int) -> Tensor:
    """`[b, s, h, d] -> [b * h_kv, h / h_kv, s, d]`, contiguous, in the dtype of computation."""
    grouped = x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return grouped.to(_compute_dtype(x.dtype)).contiguous()


def _ungroup_queries(x: Tensor, batch: int) -> Tensor:
    """Inverse of `_group_queries`, contiguous, in the dtype of computation."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _group_keys(x: Tensor) -> Tensor:
    """`[b, t, h_kv, e] -> [b * h_kv, t, e]`, contiguous, in the dtype of computation."""
    return x.transpose(1, 2).flatten(0, 1).to(_compute_dtype(x.dtype)).contiguous()


def _ungroup_keys(x: Tensor, batch: int) -> Tensor:
    """Inverse of `_group_keys`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()
