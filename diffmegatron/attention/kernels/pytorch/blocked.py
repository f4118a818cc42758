"""Attention with one or two softmax maps in blocks of query rows, in plain PyTorch.

A block has a few query rows and all of their visible keys. Map i (1 or 2) is P_i = softmax(S_i).
Only the inputs are saved, and the backward pass computes the maps again. With two maps and the
gradient dO of the output, dV = (P1 - lambda P2)^T dO. Both maps use dP = dO V^T. With the
elementwise product * and D_i = rowsum(P_i * dP):

    dS1 = P1 * (dP - D1)    dS2 = -lambda P2 * (dP - D2)    dlambda = -sum(D2)

If r heads of P1 share a head of P2, the dP of P2 is the sum of the dP of these r heads.

In the shapes b is the batch size, s the number of queries, t the number of keys, h the number of
query heads of a map, h_kv the number of kv heads, and repeats = h / h_kv. d is the width of a query
or key, and e any width. Queries have the layout `[b * h_kv, repeats, s, d]`, keys
`[b * h_kv, t, d]`, and values `[b * h_kv, t, e]`. These tensors are contiguous, in fp32 (fp64 for
fp64 inputs). In a block, heads is the number of (batch row, kv head) pairs, rows the number of
query rows, and keys the number of keys.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..first_order import first_order
from ..maps import QKV, WholeAttention, map_factors
from ..masks import AttentionMask, cached_tensors

# Number of query rows in a block times query heads per kv head. With more than 4 query heads per kv
# head, a block has 16 query rows. The values 32 and 128 were slower, by up to a third.
ROWS_PER_BLOCK = 64
# Maximum number of elements of one map per CPU core and block. One kv head alone may have more.
# 2**17 elements in fp32 are 512 KiB, so that both maps fit into a core's L2 cache.
ELEMENTS_PER_CORE = 2**17


def attend(call: AttentionCall) -> Tensor:
    """Compute attention in fp32 or wider, and return it in the dtype of the values.

    The result is deterministic to the bit for a fixed number of threads.
    """
    out: Tensor = _BlockedAttention.apply(
        call.scale, call.mask, call.lambda_, call.maps.v, *call.maps.queries, *call.maps.keys
    )
    return out


def attention_with_lse(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of one map, for `api.chunk_attention`."""
    v, mask, softmax_scale = call.maps.v, call.mask, call.scale
    q_ = group_queries(q, k.shape[2]) * softmax_scale
    k_, v_ = group_keys(k), group_keys(v)
    out = v_.new_zeros(*q_.shape[:3], v_.shape[-1])
    lse = v_.new_full((*q_.shape[:3], 1), -torch.inf)
    for heads, rows, keys in _row_blocks(q_, mask):
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
    queries, keys, v_ = _grouped((*maps.queries, *maps.keys), maps.v, softmax_scale)
    grad_ = group_queries(grad, kv_heads)
    rows_of = [
        [group_queries(x.unsqueeze(-1), kv_heads) for x in of_each_map]
        for of_each_map in (whole.lses, whole.deltas(grad, lambda_))
    ]
    factors = map_factors(lambda_, like=v_)
    dqs, dks = [torch.zeros_like(q) for q in queries], [torch.zeros_like(k) for k in keys]
    dv = torch.zeros_like(v_)
    for heads, rows, seen in _row_blocks(queries[0], mask):
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
    """Attention with one or two maps; the arguments end with all queries and then all keys."""

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
            for heads, rows, seen in _row_blocks(queries[0], mask):
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
        inputs = ctx.saved_tensors  # Activation checkpointing allows only one access.
        lambda_, v, *queries_and_keys = inputs
        mask, softmax_scale = ctx.mask, ctx.softmax_scale
        with torch.autocast(v.device.type, enabled=False):
            queries, keys, v_ = _grouped(queries_and_keys, v, softmax_scale)
            shared, repeats = queries[-1].shape[1], queries[0].shape[1] // queries[-1].shape[1]
            grad_out_ = group_queries(grad_out, v.shape[2])
            dqs, dks = ([torch.zeros_like(x) for x in each] for each in (queries, keys))
            dv, dlambda = torch.zeros_like(v_), v_.new_zeros(())
            for heads, rows, seen in _row_blocks(queries[0], mask):
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
                    dscores = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
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
    """Return the scaled queries, the keys and the values in the layouts of this module."""
    count = len(queries_and_keys) // 2
    queries = [group_queries(q, v.shape[2]) * softmax_scale for q in queries_and_keys[:count]]
    return queries, [group_keys(k) for k in queries_and_keys[count:]], group_keys(v)


def _row_blocks(q: Tensor, mask: AttentionMask) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices (heads, query rows, visible keys) for each block with visible keys.

    `q` is `[b * h_kv, repeats, s, d]`, and a head is an index of its first dimension. On a CPU a
    block has one head per thread, or several if the rows see few keys. On other devices a block has
    all heads, so that few kernels are launched.
    """
    groups, repeats, length = q.shape[:3]
    rows_per_block = max(ROWS_PER_BLOCK // repeats, 16)
    for start in range(0, length, rows_per_block):
        stop = min(start + rows_per_block, length)
        key_start, key_stop = mask.key_range(start, stop)
        if key_start == key_stop:
            continue
        heads_per_block = groups
        if q.device.type == "cpu":
            map_size = repeats * (stop - start) * (key_stop - key_start)
            heads_per_block = torch.get_num_threads() * max(ELEMENTS_PER_CORE // map_size, 1)
        for head in range(0, groups, heads_per_block):
            yield (
                slice(head, min(head + heads_per_block, groups)),
                slice(start, stop),
                slice(key_start, key_stop),
            )


def block_scores(q: Tensor, k: Tensor, mask: AttentionMask, rows: slice, keys: slice) -> Tensor:
    """Return q k^T with -inf for hidden pairs; a row without visible keys is all -inf.

    Shapes: `[heads, repeats, rows, d], [heads, keys, d] -> [heads, repeats * rows, keys]`.
    """
    scores = q.flatten(1, 2) @ k.mT
    prefix = mask.unmasked_prefix(rows.start, rows.stop)
    if prefix == scores.shape[-1]:
        return scores
    hidden = _hidden(mask, (rows.start, rows.stop), (keys.start + prefix, keys.stop), q.device)
    assert hidden is not None
    by_row = scores.unflatten(1, (q.shape[1], q.shape[2]))
    by_row[..., prefix:].masked_fill_(hidden, -torch.inf)
    return scores


def rows_without_keys(mask: AttentionMask, rows: slice, keys: slice, like: Tensor) -> Tensor | None:
    """Return a mask that is True for rows without visible keys, or None if every row sees a key.

    Its shape is `[repeats * rows, 1]`.
    """
    if mask.unmasked_prefix(rows.start, rows.stop) > 0:
        return None
    hidden = _hidden(mask, (rows.start, rows.stop), (keys.start, keys.stop), like.device)
    if hidden is None or not bool((empty := hidden.all(-1, keepdim=True)).any()):
        return None
    return empty.repeat(like.shape[1], 1)


def attention_map(q: Tensor, k: Tensor, mask: AttentionMask, rows: slice, keys: slice) -> Tensor:
    """Return softmax(q k^T) of one block, with zeros in rows without visible keys."""
    weights = block_scores(q, k, mask, rows, keys).softmax(-1)
    empty = rows_without_keys(mask, rows, keys, q)
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


def group_queries(x: Tensor, kv_heads: int) -> Tensor:
    """Rearrange `[b, s, h, e] -> [b * h_kv, repeats, s, e]`, in fp32 (fp64 for fp64)."""
    grouped = x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return grouped.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def ungroup_queries(x: Tensor, batch: int) -> Tensor:
    """Rearrange `[b * h_kv, repeats, s, e] -> [b, s, h, e]`."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def group_keys(x: Tensor) -> Tensor:
    """Rearrange `[b, t, h_kv, e] -> [b * h_kv, t, e]`, in fp32 (fp64 for fp64)."""
    grouped = x.transpose(1, 2).flatten(0, 1)
    return grouped.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def ungroup_keys(x: Tensor, batch: int) -> Tensor:
    """Rearrange `[b * h_kv, t, e] -> [b, t, h_kv, e]`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


def block_by_noise_head(x: Tensor, noise_heads: int, repeats: int = 1) -> Tensor:
    """Split dimension 1 of `[heads, noise_heads * repeats * rows, keys]` into its factors.

    Here `noise_heads` is the number of noise heads per kv head, and `repeats` the number of signal
    heads per noise head.
    """
    return x.unflatten(1, (noise_heads, repeats, -1))


def sum_over_signal_heads(x: Tensor, noise_heads: int, repeats: int) -> Tensor:
    """Sum over the signal heads of each noise head; see `block_by_noise_head`.

    The result is `[heads, noise_heads * rows, keys]`.
    """
    return x if repeats == 1 else block_by_noise_head(x, noise_heads, repeats).sum(2).flatten(1, 2)


# The mask of a block is cached, because all heads, maps and layers use the same one.
@cached_tensors
def _hidden(
    mask: AttentionMask, rows: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Tensor | None:
    return mask.hidden(rows, keys, device)
