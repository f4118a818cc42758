"""The public functions of this package, and the types of their arguments and results."""

from typing import Unpack

from torch import Tensor

from .call import AttentionCall, CallOptions, HeadwiseNorm
from .checks import check_maps, check_noise_groups, check_tensors
from .chunks import chunk_attention, chunk_gradients
from .installed_backends import backend_table, call_of, importable_libraries, installed_backend
from .maps import QKV, WholeAttention, combine_maps, merge_maps
from .registry import Backend

__all__ = [
    "QKV",
    "HeadwiseNorm",
    "WholeAttention",
    "backend_table",
    "chunk_attention",
    "chunk_gradients",
    "combine_maps",
    "diff_attention",
    "diff_attention_v2",
    "importable_libraries",
    "merge_maps",
    "softmax_attention",
    "subtract_noise",
]


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
    window: int | None = None,
    norm: HeadwiseNorm | None = None,
) -> Tensor:
    """Return `(softmax(q1 k1^T) - lambda softmax(q2 k2^T)) v` per head (arXiv 2410.05258, eq. 1).

    In the shapes b is the batch size, s the number of queries, t the number of keys, h the number
    of heads of q1 (signal heads), h_kv the number of kv heads, and d the width of a query. A global
    position is a position in the unsharded sequence.

    In grouped attention (arXiv 2510.06949) r signal heads share a head of q2 (noise head). Signal
    head n uses noise head `n // r`, and both attend to kv head `n // (h / h_kv)`.

    The output of a query without visible keys is zero. Under autocast q1, k1, q2, k2 and v are
    first cast to autocast's dtype, except if v is float64.

    Args:
        q1: `[b, s, h, d]`, floating point.
        q2: `[b, s, h / r, d]`; r = 1 without grouping.
        k1, k2: `[b, t, h_kv, d]`; h_kv divides h / r.
        v: `[b, t, h_kv, 2d]`. q1, k1, q2, k2 and v have the same dtype and device.
        lambda_: 0-dim floating-point tensor on the same device, usually fp32.
        causal: whether to hide keys at later global positions than the query.
        softmax_scale: factor of the scores, above 0; 1/sqrt(d) by default.
        backend: a key of `registry.DIFFERENTIAL`, or "auto".
        cu_seqlens: `[documents + 1]` integers, the boundaries `[0, end of first, ...]` of packed
            documents in global positions, the same for every batch row. Attention stays within a
            document. If batch rows have different documents, concatenate the rows into one. Keep
            the tensor on the CPU, because a GPU tensor forces a synchronization.
        query_offset: global position of the first query. By default the last query has the position
            of the last key.
        key_offset: global position of the first key.
        window: number of keys that a query sees, the key at its own position and those directly
            before it; None for all earlier keys. It needs `causal`.
        norm: headwise RMSNorm to apply to the result; None for no norm.

    Returns:
        `[b, s, h, 2d]` in v's dtype.

    Raises:
        ValueError: an argument is wrong, or the named backend cannot run.
    """
    check_tensors(lambda_=lambda_)
    call = AttentionCall.checked(
        QKV((q1, q2), (k1, k2), v),
        lambda_,
        norm,
        causal=causal,
        softmax_scale=softmax_scale,
        cu_seqlens=cu_seqlens,
        query_offset=query_offset,
        key_offset=key_offset,
        window=window,
    ).autocast()
    chosen = _backend_of(call, backend)
    out = chosen.function()(call)
    return out if norm is None or chosen.fuses_norm else norm.apply_to(out)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Unpack[CallOptions]
) -> Tensor:
    """Return plain softmax attention, `[b, s, h, d]` in v's dtype.

    In the shapes b is the batch size, s the number of queries, t the number of keys, h the number
    of query heads, h_kv the number of kv heads, and d the width of a head.

    Args:
        q: `[b, s, h, d]`, floating point.
        k, v: `[b, t, h_kv, d]`, same dtype and device as q; h_kv divides h.
        backend: a key of `registry.SOFTMAX`, or "auto".
        options: causal, softmax_scale, cu_seqlens, query_offset, key_offset, window as in
            `diff_attention`.
    """
    call = AttentionCall.checked(QKV((q,), (k,), v), **options).autocast()
    return _backend_of(call, backend).function()(call)


def _backend_of(call: AttentionCall, name: str) -> Backend:
    return installed_backend(name, call_of(call.op, call.maps.queries[0], call.mask.features))


def diff_attention_v2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    backend: str = "auto",
    **options: Unpack[CallOptions],
) -> Tensor:
    """Return the attention of Differential Transformer V2 (DIFF V2).

    Softmax attention computes all query heads. Then each signal head and its noise head are
    combined to `signal - lambda * noise`, with one lambda per token and signal head.

    In the shapes b is the batch size, s the number of queries, t the number of keys, h the number
    of signal heads, h_kv the number of kv heads, and d the width of a head. A group is r signal
    heads, followed by their noise head, so there are h / r groups. With r = 1, query heads 2i and
    2i + 1 form a group. Query head n attends to kv head `n // ((h + h / r) / h_kv)`.

    Args:
        q: `[b, s, h + h / r, d]`, floating point.
        k, v: `[b, t, h_kv, d]`, same dtype and device as q; h_kv divides h / r.
        lambda_: `[b, s, h]`, floating point, the result of DIFF V2's sigmoid.
        backend: a key of `registry.SOFTMAX`, or "auto".
        options: causal, softmax_scale, cu_seqlens, query_offset, key_offset, window as in
            `diff_attention`.

    Returns:
        `[b, s, h, d]` in v's dtype.
    """
    check_maps(QKV((q,), (k,), v))
    check_noise_groups("q", q, lambda_, kv_heads=k.shape[2])
    return subtract_noise(softmax_attention(q, k, v, backend=backend, **options), lambda_)


def subtract_noise(
    heads: Tensor, lambda_: Tensor, *, backend: str = "auto", sigmoid: bool = False
) -> Tensor:
    """Return `signal - lambda * noise` of every signal head, the last step of DIFF V2.

    The subtraction is computed in fp32 or wider. Only `heads` and `lambda_` are saved for the
    backward pass. In the shapes b is the batch size, s the number of tokens, h the number of signal
    heads, and d the width of a head.

    Args:
        heads: `[b, s, h + h / r, d]`, floating point. A group of r signal heads is followed by the
            noise head of the group.
        lambda_: `[b, s, h]`, floating point, on the same device.
        backend: a key of `registry.SUBTRACTION`, or "auto".
        sigmoid: whether `lambda_` has logits, whose sigmoid is lambda.

    Returns:
        `[b, s, h, d]` in heads' dtype.
    """
    check_noise_groups("heads", heads, lambda_)
    chosen = installed_backend(backend, call_of("subtraction", heads))
    out: Tensor = chosen.function()(heads, lambda_, sigmoid)
    return out
