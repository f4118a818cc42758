"""Attention between chunks of a longer sequence, forward and backward, for a ring of ranks.

The forward gives each map's part with its log-sum-exp, to be merged with the other chunks' by
`merge_maps`. The backward of a chunk needs no forward of its own: with the log-sum-exps and the
delta of the *whole* attention, a map's weights are exp(scores - lse), and the chunks' gradients
add up (Liu et al., arXiv 2310.01889, section 3). Both maps meet there, as in the unbroken backward:
10d multiply-adds per pair and head (14d where a backend's form says so) instead of the 20d of
differentiating each map's part.
"""

import torch
from torch import Tensor

from .checks import (
    check_lambda,
    check_softmax_inputs,
    check_tensors,
    check_two_maps,
    resolve_scale,
)
from .maps import QKV, WholeAttention
from .masks import AttentionMask, build_mask
from .registry import Backend, Op
from .resolve_backend import call_of, resolve_backend


def chunk_attention(
    maps: QKV,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
) -> list[tuple[Tensor, Tensor]]:
    """Each map's attention over these keys alone. Not differentiable: see `chunk_gradients`.

    Autocast changes nothing here: what is computed is of the dtype given.

    Args:
        maps: the chunks of queries and of keys and values.
        causal, softmax_scale, backend, cu_seqlens, query_offset, key_offset: as in
            `diff_attention`. A chunk of keys that all come first is best called not causal.

    Returns:
        Per map out `[b, s, its heads, e]`, zeros in a row that sees no key, and log of the sum of
        exp(scores) `[b, s, its heads]`, -inf in such a row; both fp32 (fp64 for fp64).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the named backend cannot run.
    """
    _check(maps)
    mask = _mask(maps, causal, cu_seqlens, query_offset, key_offset)
    chosen = _resolve(maps, mask, backend).load()
    scale = resolve_scale(softmax_scale, maps.queries[0].shape[3])
    with torch.no_grad(), torch.autocast(maps.v.device.type, enabled=False):
        return [
            chosen.attention_with_lse(q, k, maps.v, softmax_scale=scale, mask=mask)
            for q, k in zip(maps.queries, maps.keys, strict=True)
        ]


def chunk_gradients(
    grad: Tensor,
    maps: QKV,
    lambda_: Tensor | None,
    whole: WholeAttention,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    backend: str = "auto",
    cu_seqlens: Tensor | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
) -> QKV:
    """What a chunk of keys adds to the gradients. Not differentiable, and no matter to autocast.

    That of lambda is not among them: it is minus the sum of `whole.deltas(...)[1]`.

    Args:
        grad: `[b, s, h, e]`, of `whole.out`; it and `whole` may be of any floating-point dtype.
        maps: as in `chunk_attention`, called with the same options.
        lambda_: 0-dim floating-point tensor with two maps, None with one.
        whole: the merged result of these queries over all keys.

    Returns:
        The gradients of `maps`, in its dtype.

    Raises:
        ValueError: as `chunk_attention`, or grad, lambda_ and whole do not fit the maps.
    """
    _check(maps)
    _check_whole(grad, maps, lambda_, whole)
    mask = _mask(maps, causal, cu_seqlens, query_offset, key_offset)
    chosen = _resolve(maps, mask, backend).load()
    scale = resolve_scale(softmax_scale, maps.queries[0].shape[3])
    # A float64 map is merged in float64; to all others float32 log-sum-exps are enough.
    wide = torch.promote_types(maps.v.dtype, torch.float32)
    whole = whole._replace(lses=tuple(lse.to(wide) for lse in whole.lses))
    grad = grad.to(torch.promote_types(grad.dtype, maps.v.dtype))
    with torch.no_grad(), torch.autocast(maps.v.device.type, enabled=False):
        gradients: QKV = chosen.chunk_gradients(
            grad, maps, lambda_, whole, softmax_scale=scale, mask=mask
        )
    return gradients


def _check(maps: QKV) -> None:
    count = len(maps.queries)
    if count not in (1, 2) or len(maps.keys) != count:
        raise ValueError(
            f"maps has {count} queries and {len(maps.keys)} keys; "
            "it must have one of each, or two for differential attention"
        )
    if count == 2:
        (q1, q2), (k1, k2) = maps.queries, maps.keys
        check_two_maps(q1, k1, q2, k2, maps.v)
    else:
        check_softmax_inputs(maps.queries[0], maps.keys[0], maps.v)


def _check_whole(grad: Tensor, maps: QKV, lambda_: Tensor | None, whole: WholeAttention) -> None:
    count = len(maps.queries)
    if (lambda_ is not None) != (count == 2) or (whole.out2 is not None) != (count == 2):
        raise ValueError(
            f"lambda_ is {'' if lambda_ is None else 'not '}None and whole.out2 is "
            f"{'' if whole.out2 is None else 'not '}None with {count} map{'s' * (count > 1)}; "
            "two maps need both, one map neither"
        )
    if lambda_ is not None:
        check_lambda(lambda_, like=maps.queries[0])
    if len(whole.lses) != count:
        raise ValueError(
            f"whole.lses has {len(whole.lses)} tensors; with {count} queries it must have as many"
        )
    rows = [tuple(q.shape[:3]) for q in maps.queries]
    width = maps.v.shape[3]
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "grad": (grad, (*rows[0], width)),
        "whole.out": (whole.out, (*rows[0], width)),
        "whole.out2": (whole.out2, (*rows[-1], width)),
        **{f"whole.lses[{n}]": (lse, rows[n]) for n, lse in enumerate(whole.lses)},
    }
    for name, (x, shape) in expected.items():
        if x is None:
            continue
        check_tensors(**{name: x})
        if x.shape != shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; with queries {list(maps.queries[0].shape)} and "
                f"v {list(maps.v.shape)} it must be {list(shape)}"
            )
        if x.device != maps.v.device or not x.is_floating_point():
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}; it must be floating-point on "
                f"{maps.v.device}, where v is"
            )


def _mask(
    maps: QKV, causal: bool, cu_seqlens: Tensor | None, query_offset: int | None, key_offset: int
) -> AttentionMask:
    return build_mask(
        maps.queries[0].shape[1],
        maps.keys[0].shape[1],
        causal=causal,
        cu_seqlens=cu_seqlens,
        query_offset=query_offset,
        key_offset=key_offset,
    )


def _resolve(maps: QKV, mask: AttentionMask, backend: str) -> Backend:
    needs = mask.features | {"chunks"}
    if mask.features or not mask.is_plain:
        needs |= {"masked chunks"}
    op: Op = "softmax" if len(maps.queries) == 1 else "differential"
    return resolve_backend(backend, call_of(op, maps.queries[0], needs))
