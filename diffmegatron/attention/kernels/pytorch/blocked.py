"""Differential attention in blocks of query rows, in plain PyTorch: the CPU backend.

One block has both score matrices of a few query rows and all of their visible keys. The maps P1 and
P2 are subtracted before the product with V. In the backward pass both maps share dP = dO V^T, where
dO is the gradient of the output, and dV = (P1 - lambda P2)^T dO is one product.

Only the inputs are saved, and the backward pass computes the maps again. S_i are the scores of map
P_i, and * is the elementwise product. With D_i = rowsum(P_i * dP):

    dS1 = P1 * (dP - D1)    dS2 = -lambda P2 * (dP - D2)    dlambda = -sum(D2)

If r heads of P1 share a head of P2, the dP of P2 is the sum of the dP of these r heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..first_order import first_order
from ..maps import QKV, WholeAttention, map_factors
from ..masks import AttentionMask
from .row_blocks import (
    attention_map,
    block_by_noise_head,
    block_scores,
    group_keys,
    group_queries,
    row_blocks,
    rows_without_keys,
    sum_over_signal_heads,
    ungroup_keys,
    ungroup_queries,
)


def attend(call: AttentionCall) -> Tensor:
    """Compute attention in fp32 or wider, and return it in the dtype of the values.

    The result is deterministic to the bit for a fixed number of threads.
    """
    out: Tensor = _BlockedAttention.apply(
        call.scale, call.mask, call.lambda_, call.maps.v, *call.maps.queries, *call.maps.keys
    )
    return out


def attention_with_lse(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of one map, for `api.chunk_attention`; not differentiable.

    The output is `[batch, queries, heads of q, width of v]`, and the log-sum-exp `[batch, queries,
    heads of q]`.
    """
    v, mask, softmax_scale = call.maps.v, call.mask, call.scale
    q_ = group_queries(q, k.shape[2]) * softmax_scale
    k_, v_ = group_keys(k), group_keys(v)
    out = v_.new_zeros(*q_.shape[:3], v_.shape[-1])
    lse = v_.new_full((*q_.shape[:3], 1), -torch.inf)
    for heads, rows, keys in row_blocks(q_, mask):
        q_block = q_[heads, :, rows]
        scores = block_scores(q_block, k_[heads, keys], mask, rows, keys)
        block_lse = scores.logsumexp(-1, keepdim=True)
        weights = scores.softmax(-1)
        if (empty := rows_without_keys(mask, rows, keys, q_block)) is not None:
            weights.masked_fill_(empty, 0.0)
        product = weights @ v_[heads, keys]
        out[heads, :, rows] = product.view_as(out[heads, :, rows])
        lse[heads, :, rows] = block_lse.view_as(lse[heads, :, rows])
    batch = v.shape[0]
    return ungroup_queries(out, batch), ungroup_queries(lse, batch).squeeze(-1)


def chunk_gradients(call: AttentionCall, grad: Tensor, whole: WholeAttention) -> QKV:
    """Return the contribution of a chunk of keys to the gradients, for `api.chunk_gradients`.

    `whole` is the result of attention to all keys, and `grad` is the gradient of `whole.out`.
    """
    maps, lambda_, mask, softmax_scale = call.maps, call.lambda_, call.mask, call.scale
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
            # In a row without visible keys -inf - (-inf) would be NaN, so subtract 0.
            weights = scores.sub_(row_lse.masked_fill(row_lse == -torch.inf, 0.0)).exp_()
            weights.mul_(factor)
            shared, repeats = q.shape[1], queries[0].shape[1] // q.shape[1]
            block_by_noise_head(combined, shared, repeats).add_(
                block_by_noise_head(weights, shared)
            )
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


class _BlockedAttention(torch.autograd.Function):
    """Attention with one map, or with two maps and their subtraction.

    `queries_and_keys` has the queries of all maps and then the keys of all maps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        softmax_scale: float,
        mask: AttentionMask,
        lambda_: Tensor | None,
        v: Tensor,
        *queries_and_keys: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(lambda_, v, *queries_and_keys)
        ctx.softmax_scale, ctx.mask = softmax_scale, mask
        with torch.autocast(v.device.type, enabled=False):
            queries, keys, v_ = _grouped(queries_and_keys, v, softmax_scale)
            shared, repeats = queries[-1].shape[1], queries[0].shape[1] // queries[-1].shape[1]
            out = v_.new_zeros(*queries[0].shape[:3], v_.shape[-1])
            for heads, rows, seen in row_blocks(queries[0], mask):
                combined, *noise = (
                    attention_map(q[heads, :, rows], k[heads, seen], mask, rows, seen)
                    for q, k in zip(queries, keys, strict=True)
                )
                if lambda_ is not None:
                    map2, weight = block_by_noise_head(noise[0], shared), lambda_.to(v_.dtype)
                    block_by_noise_head(combined, shared, repeats).addcmul_(
                        map2, weight, value=-1.0
                    )
                product = combined @ v_[heads, seen]
                out[heads, :, rows] = product.view_as(out[heads, :, rows])
            return ungroup_queries(out, v.shape[0]).to(v.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors  # Activation checkpointing allows only one access to it.
        lambda_, v, *queries_and_keys = inputs
        mask, softmax_scale = ctx.mask, ctx.softmax_scale
        with torch.autocast(v.device.type, enabled=False):
            queries, keys, v_ = _grouped(queries_and_keys, v, softmax_scale)
            shared, repeats = queries[-1].shape[1], queries[0].shape[1] // queries[-1].shape[1]
            grad_out_ = group_queries(grad_out, v.shape[2])
            dqs, dks = ([torch.zeros_like(x) for x in each] for each in (queries, keys))
            dv, dlambda = torch.zeros_like(v_), v_.new_zeros(())
            for heads, rows, seen in row_blocks(queries[0], mask):
                weights = [
                    attention_map(q[heads, :, rows], k[heads, seen], mask, rows, seen)
                    for q, k in zip(queries, keys, strict=True)
                ]
                dout = grad_out_[heads, :, rows].flatten(1, 2)
                dmaps, combined = [dout @ v_[heads, seen].mT], weights[0]
                if lambda_ is not None:
                    noise, weight = block_by_noise_head(weights[1], shared), lambda_.to(v_.dtype)
                    signal = block_by_noise_head(combined, shared, repeats)
                    combined = torch.addcmul(signal, noise, weight, value=-1.0).view_as(combined)
                    dmaps.append(sum_over_signal_heads(dmaps[0], shared, repeats))
                    dlambda -= torch.dot(weights[1].flatten(), dmaps[1].flatten())
                dv[heads, seen].baddbmm_(combined.mT, dout)
                for p, dp, q, k, dq, dk in zip(
                    weights, dmaps, queries, keys, dqs, dks, strict=True
                ):
                    dscores = _softmax_backward(p, dp)
                    product = dscores @ k[heads, seen]
                    dq[heads, :, rows] = product.view_as(dq[heads, :, rows])
                    dk[heads, seen].baddbmm_(dscores.mT, q[heads, :, rows].flatten(1, 2))
            if lambda_ is not None:
                # The loop above leaves out the factor -lambda in the gradients of q2 and k2.
                for x in (dqs[1], dks[1]):
                    x.mul_(-lambda_.to(v_.dtype))
            batch = v.shape[0]
            gradients = [
                ungroup_keys(dv, batch),
                *(ungroup_queries(dq * softmax_scale, batch) for dq in dqs),
                *(ungroup_keys(dk, batch) for dk in dks),
            ]
        cast = [grad.to(v.dtype) for grad in gradients]
        return None, None, None if lambda_ is None else dlambda.to(lambda_.dtype), *cast


def _grouped(
    queries_and_keys: Sequence[Tensor], v: Tensor, softmax_scale: float
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return the scaled queries, the keys and the values in the layouts of `row_blocks`."""
    count = len(queries_and_keys) // 2
    queries = [group_queries(q, v.shape[2]) * softmax_scale for q in queries_and_keys[:count]]
    return queries, [group_keys(k) for k in queries_and_keys[count:]], group_keys(v)


def _softmax_backward(weights: Tensor, dweights: Tensor) -> Tensor:
    """Return dS = P * (dP - rowsum(P * dP)) for weights P and their gradient dP."""
    dscores: Tensor = torch.ops.aten._softmax_backward_data(dweights, weights, -1, weights.dtype)
    return dscores
