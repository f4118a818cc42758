"""The two public attention functions: differential, and the Transformer twin's softmax."""

from types import ModuleType
from typing import Literal, overload

import torch
from torch import Tensor

from . import sdpa
from .masking import AttentionMask
from .norm import HeadwiseNorm
from .partial import PartialAttention
from .select import resolve_backend
from .validate import (
    autocast_dtype,
    build_mask,
    check_diff_inputs,
    check_softmax_inputs,
    check_tensors,
    resolve_scale,
)


@overload
def diff_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    backend: str = ...,
    cu_seqlens: Tensor | None = ...,
    query_offset: int | None = ...,
    key_offset: int = ...,
    norm: HeadwiseNorm | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def diff_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    backend: str = ...,
    cu_seqlens: Tensor | None = ...,
    query_offset: int | None = ...,
    key_offset: int = ...,
    norm: HeadwiseNorm | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, PartialAttention]: ...


def diff_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
    norm: HeadwiseNorm | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, PartialAttention]:
    """`(softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v` per head (arXiv 2410.05258, equation 1).

    Query head n meets kv head `n // (h / h_kv)`. A query row that sees no key gets zeros.
    Under autocast q, k and v are cast to autocast's dtype.

    Args:
        q1, q2: `[b, s, h, d]`, floating point.
        k1, k2: `[b, t, h_kv, d]`, same dtype and device; h_kv divides h.
        v: `[b, t, h_kv, 2d]`, likewise.
        lambda_: 0-dim floating-point tensor on the same device (fp32 beside bf16 is usual).
        causal: hide keys at later positions than the query.
        softmax_scale: factor of the scores, above 0; 1/sqrt(d) by default.
        backend: a name of `select.BACKENDS`, or "auto".
        cu_seqlens: `[documents + 1]` integers, the boundaries `[0, end of first, ...]` of packed
            documents in global positions, the same for every batch row; attention stays within a
            document. Fold the batch into one row when the rows differ. Best kept on the CPU: its
            values are read.
        query_offset: global position of the first query. By default the last query stands at the
            last key, so that a shorter s is the end of the sequence (decoding).
        key_offset: global position of the first key.
        norm: headwise RMSNorm to apply to the result; the Triton backend does it in its epilogue.
        return_lse: also return both maps' results over these keys with their log-sum-exps, for
            `merge_partial`. Costs 6d and 14d multiply-adds per pair instead of 4d-6d and 10d.

    Returns:
        `[b, s, h, 2d]` in v's dtype; with `return_lse` a pair of it and a `PartialAttention`, both
        differentiable.

    Raises:
        ValueError: shapes, dtypes, devices, head counts or cu_seqlens do not fit, or the named
            backend cannot run.
    """
    check_diff_inputs(q1, k1, q2, k2, v, lambda_)
    if norm is not None:
        norm.check(v)
    mask = build_mask(
        q1.shape[1],
        k1.shape[1],
        causal=causal,
        cu_seqlens=cu_seqlens,
        query_offset=query_offset,
        key_offset=key_offset,
    )
    dtype = autocast_dtype(q1)
    needs = mask.features | ({"lse"} if return_lse else set())
    chosen = resolve_backend(backend, q1.device.type, dtype, q1.shape[3], needs)
    inputs = tuple(x.to(dtype) for x in (q1, k1, q2, k2, v))
    scale = resolve_scale(softmax_scale, q1.shape[3])
    if return_lse:
        partial = _both_maps(chosen.load(), *inputs, softmax_scale=scale, mask=mask)
        out = partial.output(lambda_).to(dtype)
        return (out if norm is None else norm.apply_to(out)), partial
    options = {"norm": norm} if norm is not None and chosen.fuses_norm else {}
    out = chosen.load().diff_attention(*inputs, lambda_, softmax_scale=scale, mask=mask, **options)
    return out if norm is None or chosen.fuses_norm else norm.apply_to(out)


def _both_maps(
    backend: ModuleType,
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: AttentionMask,
) -> PartialAttention:
    out1, lse1 = _one_map(backend, q1, k1, v, softmax_scale=softmax_scale, mask=mask)
    out2, lse2 = _one_map(backend, q2, k2, v, softmax_scale=softmax_scale, mask=mask)
    return PartialAttention(out1, out2, lse1, lse2)


def _one_map(
    backend: ModuleType,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: AttentionMask,
) -> tuple[Tensor, Tensor]:
    with torch.autocast(v.device.type, enabled=False):
        out, lse = backend.attention_with_lse(q, k, v, softmax_scale=softmax_scale, mask=mask)
    # A merge by log-sum-exps sends NaN back to a row that sees no key; it is stopped here.
    return out, lse.masked_fill(lse.detach() == -torch.inf, -torch.inf)


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """`softmax(q k^T) v` over some of the keys, to be merged with the rest by its log-sum-exp.

    Args:
        q: `[b, s, h, d]`, floating point.
        k: `[b, t, h_kv, d]`, same dtype and device; h_kv divides h.
        v: `[b, t, h_kv, d]` or `[b, t, h_kv, 2d]`, likewise.
        causal, softmax_scale, backend, cu_seqlens, query_offset, key_offset: as in
            `diff_attention`.

    Returns:
        out `[b, s, h, d]` or `[b, s, h, 2d]`, zeros in a row that sees no key; log of the sum of
        exp(scores) `[b, s, h]`, -inf in such a row. Both fp32 (fp64 for fp64) and differentiable.

    Raises:
        ValueError: as `diff_attention`.
    """
    check_tensors(q=q, k=k, v=v)
    is_narrow = v.shape[-1:] == q.shape[-1:]
    check_softmax_inputs(q, k, v, value_width=1 if is_narrow else 2)
    mask = build_mask(
        q.shape[1],
        k.shape[1],
        causal=causal,
        cu_seqlens=cu_seqlens,
        query_offset=query_offset,
        key_offset=key_offset,
    )
    dtype = autocast_dtype(q)
    needs = mask.features | {"lse"} | ({"narrow"} if is_narrow else set())
    chosen = resolve_backend(backend, q.device.type, dtype, q.shape[3], needs)
    scale = resolve_scale(softmax_scale, q.shape[3])
    return _one_map(
        chosen.load(), q.to(dtype), k.to(dtype), v.to(dtype), softmax_scale=scale, mask=mask
    )


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
) -> Tensor:
    """Plain softmax attention of the Transformer twin, by torch's scaled_dot_product_attention.

    Args:
        q: `[b, s, h, d]`, floating point.
        k, v: `[b, t, h_kv, d]`, same dtype and device; h_kv divides h.
        causal, softmax_scale, cu_seqlens, query_offset, key_offset: as in `diff_attention`.

    Returns:
        `[b, s, h, d]` in v's dtype.

    Raises:
        ValueError: as `diff_attention`.
    """
    check_softmax_inputs(q, k, v)
    mask = build_mask(
        q.shape[1],
        k.shape[1],
        causal=causal,
        cu_seqlens=cu_seqlens,
        query_offset=query_offset,
        key_offset=key_offset,
    )
    dtype = autocast_dtype(q)
    scale = resolve_scale(softmax_scale, q.shape[3])
    return sdpa.softmax_attention(
        q.to(dtype), k.to(dtype), v.to(dtype), softmax_scale=scale, mask=mask
    )
