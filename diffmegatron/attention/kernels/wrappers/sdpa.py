"""Attention by torch's scaled_dot_product_attention: softmax in one call, differential in four.

In the shapes b is the batch size, s the number of queries, t the number of keys, h the number of
query heads of a map, h_kv the number of kv heads, and e the width of a key or value.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..call import AttentionCall
from ..maps import QKV, WholeAttention, map_gradients
from ..masks import AttentionMask
from .two_map_calls import four_calls
from .varlen import KeptImplementation, use_flash_attention

aten = torch.ops.aten


def attend(call: AttentionCall) -> Tensor:
    """Compute softmax attention by one call, or differential attention by four calls."""
    use_flash_attention(None)
    bias = _bias(call.mask, call.maps.v)
    attend_map = partial(_attend, softmax_scale=call.scale, bias=bias, causal=call.mask.causal)
    if call.lambda_ is None:
        return attend_map(*call.maps.arguments())
    return four_calls(attend_map, call)


def attention_with_lse(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp of one map by torch's flash kernels; not differentiable.

    V is split along its width into pieces as wide as Q, because the kernels need equal widths.
    """
    v = call.maps.v
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = q.transpose(1, 2), _per_query_head(k, q.shape[2])
    outs = []
    for values in _pieces(v, q.shape[1], q.shape[3]):
        out, lse = _flash(q, k, values, call.mask.causal, call.scale)[:2]
        outs.append(out)
    return torch.cat(outs, -1).transpose(1, 2).to(dtype), lse.transpose(1, 2).to(dtype)


def chunk_gradients(call: AttentionCall, grad: Tensor, whole: WholeAttention) -> QKV:
    """Return the contribution of a chunk of keys to the gradients, by torch's flash kernels.

    For each map, O is the output of attention over all keys, and dO its gradient. V, O and dO are
    split along their width into pieces as wide as Q, with a kernel call per piece. With the
    attention weights P, the gradient of the scores is P * (dO V^T - rowsum(dO * O)). It is a sum
    over the width of V, so the gradients of q and k are sums over the pieces.
    """
    maps, lambda_ = call.maps, call.lambda_
    kv_heads, width = maps.v.shape[2], maps.queries[0].shape[3]
    grads = map_gradients(grad, lambda_, maps.queries[-1].shape[2])
    dqs, dks = [], []
    dv = torch.zeros_like(maps.v)
    for q, k, dout, out, lse in zip(
        maps.queries, maps.keys, grads, whole.outs(lambda_), whole.lses, strict=True
    ):
        heads = q.shape[2]
        q, k = q.transpose(1, 2), _per_query_head(k, heads)
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        row_lse = lse.transpose(1, 2).contiguous()
        pieces = [_pieces(x, heads, width) for x in (maps.v, dout.to(q.dtype), out.to(q.dtype))]
        dvalues = []
        for values, piece_grad, piece_out in zip(*pieces, strict=True):
            inputs = (piece_grad, q, k, values, piece_out, row_lse)
            found = _flash_gradients(*inputs, causal=call.mask.causal, scale=call.scale)
            dq += found[0]
            dk += found[1]
            dvalues.append(found[2])
        dqs.append(dq.transpose(1, 2))
        dks.append(_per_kv_head(dk, kv_heads))
        dv += _per_kv_head(torch.cat(dvalues, -1), kv_heads)
    return QKV(tuple(dqs), tuple(dks), dv)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return (output, log-sum-exp, ...) of the device's flash kernel.

    q, k and v are `[b, h, length, width]`. On CUDA the width must be a multiple of 8.
    """
    use_flash_attention(None)
    flash = aten._scaled_dot_product_flash_attention
    if not q.is_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
    outputs: tuple[Tensor, ...] = flash(q, k, v, 0.0, causal, scale=scale)
    return outputs


def _flash_gradients(*inputs: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, given dO, q, k, v, the output and the log-sum-exp."""
    gradients: tuple[Tensor, ...]
    _, q, k, *_ = inputs
    use_flash_attention(None)
    if q.is_cuda:
        # The random state is only for dropout, and the cumulative lengths only for nested tensors.
        unused = torch.empty(0, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        gradients = aten._scaled_dot_product_flash_attention_backward(
            *inputs, *lengths, 0.0, causal, unused, unused, scale=scale
        )
    else:
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, causal, scale=scale
        )
    return gradients


def _pieces(x: Tensor, heads: int, width: int) -> list[Tensor]:
    """Split `[b, length, heads or kv heads, n * width]` along its width into n tensors.

    Each is `[b, heads, length, width]`, with kv heads repeated for the query heads.
    """
    return list(_per_query_head(x, heads).split(width, -1))


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat each kv head for the query heads that share it: `[b, t, h_kv, e] -> [b, h, t, e]`.

    The backward pass of the flash kernels cannot sum gradients over these query heads.
    """
    return x.transpose(1, 2).repeat_interleave(heads // x.shape[2], dim=1)


def _per_kv_head(grad: Tensor, kv_heads: int) -> Tensor:
    """Sum `[b, h, t, e] -> [b, t, h_kv, e]` over the query heads that share a kv head."""
    return grad.unflatten(1, (kv_heads, -1)).sum(2).transpose(1, 2)


class _Bias(NamedTuple):
    """A mask in the form that torch's kernels accept.

    `scores` `[s, t]` is added to the attention scores: -inf for hidden pairs, 0 for others.
    `empty_rows` `[s, 1]` is True for queries without visible keys. In their rows `scores` is 0.
    """

    scores: Tensor
    empty_rows: Tensor


def _attend(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, bias: _Bias | None, causal: bool
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    if bias is None:
        out = scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=repeats > 1
        )
        kept: Tensor = KeptImplementation.apply(None, out)
        return kept.transpose(1, 2)
    if repeats > 1:
        # With a mask and `enable_gqa`, CUDA would use the implementation that stores all scores.
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=bias.scores, scale=softmax_scale)
    return out.masked_fill(bias.empty_rows, 0.0).transpose(1, 2)


def _bias(mask: AttentionMask, v: Tensor) -> _Bias | None:
    """Return the mask for torch, or None if torch's `is_causal` can express the mask."""
    if mask.is_plain:
        return None
    hidden = mask.hidden((0, mask.query_length), (0, mask.key_length), v.device)
    if hidden is None:
        return None
    # A row without visible keys would give NaN, so show it all keys. `_attend` zeroes its output.
    empty_rows = hidden.all(-1, keepdim=True)
    scores = torch.zeros_like(hidden, dtype=v.dtype).masked_fill_(hidden & ~empty_rows, -torch.inf)
    return _Bias(scores, empty_rows)
