"""Differential attention in blocks of query rows, in plain PyTorch: the CPU backend.

One block holds both score matrices of a few query rows against all the keys they see. Both maps
are normalised and subtracted before they meet V, so the forward costs 4d multiply-adds per
(query, key) pair and the backward 10d, as much as a plain Transformer of equal size: dP = dO V^T is
shared by the maps and dV = (P1 - lambda P2)^T dO is one product. Only the inputs are saved; the
backward computes the maps again. With D_i = rowsum(P_i * dP):

    dS1 = P1 * (dP - D1)    dS2 = -lambda P2 * (dP - D2)    dlambda = -sum(D2)

Where r signal heads share a noise head, its P2 is computed once, and its dP is the sum of theirs.
"""

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from ..maps import QKV, WholeAttention, map_factors
from ..masks import AttentionMask
from .row_blocks import (
    attention_map,
    block_scores,
    by_noise_head,
    group_keys,
    group_queries,
    row_blocks,
    sees_nothing,
    sum_over_signal_heads,
    ungroup_keys,
    ungroup_queries,
)


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
    """Shapes as in `api.diff_attention`.

    16-bit inputs are computed in fp32 and the result rounded once. Bit-deterministic for a fixed
    number of threads.
    """
    out: Tensor = _BlockedDiffAttention.apply(q1, k1, q2, k2, v, lambda_, softmax_scale, mask)
    return out


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: AttentionMask
) -> Tensor:
    """As `diff_attention`, of one map: `[b, s, h, d]`, `[b, t, h_kv, d]` twice."""
    out: Tensor = _BlockedSoftmaxAttention.apply(q, k, v, softmax_scale, mask)
    return out


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: AttentionMask
) -> tuple[Tensor, Tensor]:
    """One map's part in `api.chunk_attention`, of values of any width. Not differentiable."""
    q_ = group_queries(q, k.shape[2]) * softmax_scale
    k_, v_ = group_keys(k), group_keys(v)
    out = v_.new_zeros(*q_.shape[:3], v_.shape[-1])
    lse = v_.new_full((*q_.shape[:3], 1), -torch.inf)
    for heads, rows, keys in row_blocks(q_, mask):
        q_block = q_[heads, :, rows]
        scores = block_scores(q_block, k_[heads, keys], mask, rows, keys)
        block_lse = scores.logsumexp(-1, keepdim=True)
        weights = scores.softmax(-1)
        if (empty := sees_nothing(mask, rows, keys, q_block)) is not None:
            weights.masked_fill_(empty, 0.0)
        product = weights @ v_[heads, keys]
        out[heads, :, rows] = product.view_as(out[heads, :, rows])
        lse[heads, :, rows] = block_lse.view_as(lse[heads, :, rows])
    batch = v.shape[0]
    return ungroup_queries(out, batch), ungroup_queries(lse, batch).squeeze(-1)


def chunk_gradients(
    grad: Tensor,
    maps: QKV,
    lambda_: Tensor | None,
    whole: WholeAttention,
    *,
    softmax_scale: float,
    mask: AttentionMask,
) -> QKV:
    """As `api.chunk_gradients`."""
    batch, kv_heads = maps.v.shape[0], maps.v.shape[2]
    queries = [group_queries(q, kv_heads) * softmax_scale for q in maps.queries]
    keys, v_ = [group_keys(k) for k in maps.keys], group_keys(maps.v)
    grad_ = group_queries(grad, kv_heads)
    rows_of = [
        [group_queries(x.unsqueeze(-1), kv_heads) for x in of_each_map]
        for of_each_map in (whole.lses, whole.deltas(grad, lambda_))
    ]
    factors = map_factors(lambda_, like=v_)
    dqs, dks = [torch.zeros_like(q) for q in queries], [torch.zeros_like(k) for k in keys]
    dv = torch.zeros_like(v_)
    for heads, rows, seen in row_blocks(queries[0], mask):
        dout = grad_[heads, :, rows].flatten(1, 2)
        dmap = dout @ v_[heads, seen].mT
        combined = torch.zeros_like(dmap)
        for q, k, lse, of_map, factor, dq, dk in zip(
            queries, keys, *rows_of, factors, dqs, dks, strict=True
        ):
            q_block, k_block = q[heads, :, rows], k[heads, seen]
            scores = block_scores(q_block, k_block, mask, rows, seen)
            row_lse, delta = (x[heads, :, rows].flatten(1, 2) for x in (lse, of_map))
            # A row that sees no key at all has -inf here, and so have its scores.
            weights = scores.sub_(row_lse.masked_fill(row_lse == -torch.inf, 0.0)).exp_()
            weights.mul_(factor)
            shared, repeats = q.shape[1], queries[0].shape[1] // q.shape[1]
            by_noise_head(combined, shared, repeats).add_(by_noise_head(weights, shared))
            dscores = weights.mul_(sum_over_signal_heads(dmap, shared, repeats) - delta)
            product = dscores @ k_block
            dq[heads, :, rows] = product.view_as(q_block)
            dk[heads, seen].baddbmm_(dscores.mT, q_block.flatten(1, 2))
        dv[heads, seen].baddbmm_(combined.mT, dout)
    dtype = maps.v.dtype
    return QKV(
        tuple(ungroup_queries(dq * softmax_scale, batch).to(dtype) for dq in dqs),
        tuple(ungroup_keys(dk, batch).to(dtype) for dk in dks),
        ungroup_keys(dv, batch).to(dtype),
    )


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
            q1_, q2_ = (group_queries(q, kv_heads) * softmax_scale for q in (q1, q2))
            k1_, k2_, v_ = (group_keys(x) for x in (k1, k2, v))
            shared, repeats = q2_.shape[1], q1_.shape[1] // q2_.shape[1]
            weight = lambda_.to(v_.dtype)
            out = v_.new_zeros(*q1_.shape[:3], v_.shape[-1])
            for heads, rows, keys in row_blocks(q1_, mask):
                map1 = attention_map(q1_[heads, :, rows], k1_[heads, keys], mask, rows, keys)
                map2 = attention_map(q2_[heads, :, rows], k2_[heads, keys], mask, rows, keys)
                noise = by_noise_head(map2, shared)
                by_noise_head(map1, shared, repeats).addcmul_(noise, weight, value=-1.0)
                product = map1 @ v_[heads, keys]
                out[heads, :, rows] = product.view_as(out[heads, :, rows])
            return ungroup_queries(out, v.shape[0]).to(v.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # read once: activation checkpointing refuses a second read
        q1, k1, q2, k2, v, lambda_ = inputs
        mask, softmax_scale = ctx.mask, ctx.softmax_scale
        with torch.autocast(q1.device.type, enabled=False):
            batch, kv_heads = v.shape[0], v.shape[2]
            q1_, q2_ = (group_queries(q, kv_heads) * softmax_scale for q in (q1, q2))
            k1_, k2_, v_ = (group_keys(x) for x in (k1, k2, v))
            shared, repeats = q2_.shape[1], q1_.shape[1] // q2_.shape[1]
            grad_out_ = group_queries(grad_out, kv_heads)
            weight = lambda_.to(v_.dtype)
            dq1, dq2, dk1, dk2, dv = (torch.zeros_like(x) for x in (q1_, q2_, k1_, k2_, v_))
            dlambda = torch.zeros_like(weight)
            for heads, rows, keys in row_blocks(q1_, mask):
                map1 = attention_map(q1_[heads, :, rows], k1_[heads, keys], mask, rows, keys)
                map2 = attention_map(q2_[heads, :, rows], k2_[heads, keys], mask, rows, keys)
                dout = grad_out_[heads, :, rows].flatten(1, 2)
                dmap = dout @ v_[heads, keys].mT
                noise = by_noise_head(map2, shared)
                combined = torch.addcmul(
                    by_noise_head(map1, shared, repeats), noise, weight, value=-1.0
                ).view_as(map1)
                dv[heads, keys].baddbmm_(combined.mT, dout)
                dmap2 = sum_over_signal_heads(dmap, shared, repeats)
                dlambda -= torch.dot(map2.flatten(), dmap2.flatten())
                for weights, dweights, q, k, dq, dk in (
                    (map1, dmap, q1_, k1_, dq1, dk1),
                    (map2, dmap2, q2_, k2_, dq2, dk2),
                ):
                    dscores = _softmax_backward(weights, dweights)
                    product = dscores @ k[heads, keys]
                    dq[heads, :, rows] = product.view_as(dq[heads, :, rows])
                    dk[heads, keys].baddbmm_(dscores.mT, q[heads, :, rows].flatten(1, 2))
            # The second map's scores weigh -lambda.
            dq2.mul_(-weight)
            dk2.mul_(-weight)
            dq1, dq2 = (ungroup_queries(dq * softmax_scale, batch) for dq in (dq1, dq2))
            dk1, dk2, dv = (ungroup_keys(x, batch) for x in (dk1, dk2, dv))
        grads = zip((dq1, dk1, dq2, dk2, dv, dlambda), inputs, strict=True)
        return (*(grad.to(x.dtype) for grad, x in grads), None, None)


class _BlockedSoftmaxAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: AttentionMask
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.softmax_scale, ctx.mask = softmax_scale, mask
        with torch.autocast(q.device.type, enabled=False):
            q_ = group_queries(q, k.shape[2]) * softmax_scale
            k_, v_ = group_keys(k), group_keys(v)
            out = v_.new_zeros(*q_.shape[:3], v_.shape[-1])
            for heads, rows, keys in row_blocks(q_, mask):
                weights = attention_map(q_[heads, :, rows], k_[heads, keys], mask, rows, keys)
                product = weights @ v_[heads, keys]
                out[heads, :, rows] = product.view_as(out[heads, :, rows])
            return ungroup_queries(out, v.shape[0]).to(v.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # read once: activation checkpointing refuses a second read
        q, k, v = inputs
        mask, softmax_scale = ctx.mask, ctx.softmax_scale
        with torch.autocast(q.device.type, enabled=False):
            batch, kv_heads = v.shape[0], v.shape[2]
            q_ = group_queries(q, kv_heads) * softmax_scale
            k_, v_ = group_keys(k), group_keys(v)
            grad_out_ = group_queries(grad_out, kv_heads)
            dq, dk, dv = (torch.zeros_like(x) for x in (q_, k_, v_))
            for heads, rows, keys in row_blocks(q_, mask):
                weights = attention_map(q_[heads, :, rows], k_[heads, keys], mask, rows, keys)
                dout = grad_out_[heads, :, rows].flatten(1, 2)
                dv[heads, keys].baddbmm_(weights.mT, dout)
                dscores = _softmax_backward(weights, dout @ v_[heads, keys].mT)
                product = dscores @ k_[heads, keys]
                dq[heads, :, rows] = product.view_as(dq[heads, :, rows])
                dk[heads, keys].baddbmm_(dscores.mT, q_[heads, :, rows].flatten(1, 2))
            dq = ungroup_queries(dq * softmax_scale, batch)
            dk, dv = ungroup_keys(dk, batch), ungroup_keys(dv, batch)
        return (*(g.to(x.dtype) for g, x in zip((dq, dk, dv), inputs, strict=True)), None, None)


def _softmax_backward(weights: Tensor, dweights: Tensor) -> Tensor:
    """dS = P * (dP - rowsum(P * dP)), by the kernel of torch's own softmax."""
    dscores: Tensor = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
    return dscores
