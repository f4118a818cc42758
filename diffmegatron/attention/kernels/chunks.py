"""Attention between chunks of a longer sequence, forward and backward, for a ring of ranks.

`chunk_attention` returns the output and the log-sum-exp (lse) of each softmax map over one chunk of
keys. `maps.merge_maps` merges the results of all chunks. From the merged results,
`chunk_gradients` computes the contribution of one chunk of keys to the gradients. For the queries,
the caller sums the contributions of all chunks of keys (Liu et al., arXiv 2310.01889, section 3).

In the shapes b is the batch size, s the number of queries, h the number of heads of the first map,
and e the width of a value.
"""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from .call import AttentionCall, CallOptions
from .checks import check_lambda, check_tensors
from .installed_backends import call_of, installed_backend
from .maps import QKV, WholeAttention
from .registry import Backend


def chunk_attention(
    maps: QKV, *, backend: str = "auto", **options: Unpack[CallOptions]
) -> list[tuple[Tensor, Tensor]]:
    """Return the output and the log-sum-exp of each map over one chunk of keys.

    The function is not differentiable (see `chunk_gradients`), and autocast has no effect.

    Args:
        maps: a chunk of the queries, and a chunk of the keys and values.
        backend: "auto", or a key of `registry.SOFTMAX` (one map) or `registry.DIFFERENTIAL` (two).
        options: as in `api.diff_attention`. If all keys precede the queries, causal=False gives the
            same result faster.

    Returns:
        For each map its output `[b, s, heads of the map, e]` and its log-sum-exp `[b, s, heads of
        the map]`, in fp32 (fp64 for fp64 inputs). A query without visible keys has the output 0
        and the log-sum-exp -inf.
    """
    call = AttentionCall.checked(maps, **options)
    attention_with_lse = _chosen_backend(call, backend).function("attention_with_lse")
    with torch.no_grad(), torch.autocast(maps.v.device.type, enabled=False):
        return [attention_with_lse(call, q, k) for q, k in zip(*maps[:2], strict=True)]


def chunk_gradients(
    grad: Tensor,
    maps: QKV,
    lambda_: Tensor | None,
    whole: WholeAttention,
    *,
    backend: str = "auto",
    **options: Unpack[CallOptions],
) -> QKV:
    """Return the contribution of a chunk of keys to the gradients of queries, keys and values.

    The function is not differentiable, and autocast has no effect. The gradient of lambda is not
    returned. With two maps it is `-whole.deltas(grad, lambda_)[1].sum()`. This value covers all
    keys, so do not sum it over chunks of keys.

    Args:
        grad: gradient of `whole.out`, `[b, s, h, e]`.
        maps: the queries, keys and values that `chunk_attention` received.
        lambda_: 0-dim tensor; None with one map.
        whole: results of attention over all keys, for the same queries.
        backend, options: as in `chunk_attention`.
    """
    call = replace(AttentionCall.checked(maps, **options), lambda_=lambda_)
    _check_whole(grad, maps, lambda_, whole)
    compute = _chosen_backend(call, backend).function("chunk_gradients")
    wide = torch.promote_types(maps.v.dtype, torch.float32)
    whole = whole._replace(lses=tuple(lse.to(wide) for lse in whole.lses))
    grad = grad.to(torch.promote_types(grad.dtype, maps.v.dtype))
    with torch.no_grad(), torch.autocast(maps.v.device.type, enabled=False):
        gradients: QKV = compute(call, grad, whole)
    return gradients


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


def _chosen_backend(call: AttentionCall, backend: str) -> Backend:
    needs = call.mask.features | {"chunks"}
    if call.mask.features or not call.mask.is_plain:
        needs |= {"masked chunks"}
    return installed_backend(backend, call_of(call.op, call.maps.queries[0], needs))
