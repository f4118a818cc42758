"""Checks of what the public functions were given; every error names the argument and its shape."""

import math
from itertools import pairwise
from numbers import Integral, Real

import torch
from torch import Tensor

from .masking import AttentionMask

# The kernels count positions in 32 bits; half of that leaves room for a length beside an offset.
LARGEST_POSITION = 2**30


def check_diff_inputs(
    q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor, lambda_: Tensor
) -> None:
    """Raise ValueError unless the shapes, dtypes and devices are those of `diff_attention`."""
    check_two_maps(q1, k1, q2, k2, v)
    check_lambda(lambda_, like=q1)


def check_two_maps(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, v: Tensor) -> None:
    """Raise ValueError unless the shapes, dtypes and devices are those of two maps."""
    check_tensors(q1=q1, k1=k1, q2=q2, k2=k2, v=v)
    check_layout(q1=q1, k1=k1, v=v, value_width=2)
    for name, x, like_name, like in (("q2", q2, "q1", q1), ("k2", k2, "k1", k1)):
        if x.shape != like.shape:
            raise ValueError(
                f"{name} has shape {_shape(x)}; it must equal {like_name}'s {_shape(like)}"
            )
    _check_same_kind(q1=q1, k1=k1, q2=q2, k2=k2, v=v)


def check_lambda(lambda_: Tensor, like: Tensor) -> None:
    """Raise ValueError unless it is one floating-point number where the queries are."""
    check_tensors(lambda_=lambda_)
    if lambda_.dim() != 0 or not lambda_.is_floating_point():
        raise ValueError(
            f"lambda_ has shape {_shape(lambda_)} and dtype {lambda_.dtype}; "
            "it must be a 0-dim floating-point tensor"
        )
    if lambda_.device != like.device:
        raise ValueError(f"lambda_ is on {lambda_.device} but q1 on {like.device}")


def check_softmax_inputs(q: Tensor, k: Tensor, v: Tensor, value_width: int = 1) -> None:
    """Raise ValueError unless shapes, dtypes and devices are those of one map.

    `value_width` is v's, in widths of a query.
    """
    check_tensors(q=q, k=k, v=v)
    check_layout(q=q, k=k, v=v, value_width=value_width)
    _check_same_kind(q=q, k=k, v=v)


def check_tensors(**arguments: object) -> None:
    """Raise ValueError unless all are tensors."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is of type {type(x).__name__}; it must be a tensor")


def resolve_scale(softmax_scale: float | None, head_dim: int) -> float:
    """The factor of the scores, 1/sqrt(d) by default.

    Raises:
        ValueError: it is not a finite number above 0: torch's kernels hide scores by -inf before
            they multiply, which a 0 or a negative factor makes NaN or +inf.
    """
    if softmax_scale is None:
        return head_dim**-0.5
    if not isinstance(softmax_scale, Real) or not 0.0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale!r}; it must be a finite number above 0")
    return float(softmax_scale)


def check_layout(*, v: Tensor, value_width: int, **queries_and_keys: Tensor) -> None:
    """Check one query, one key and the value: ranks, batch, lengths, head counts and widths."""
    (q_name, q), (k_name, k) = queries_and_keys.items()
    for name, x in ((q_name, q), (k_name, k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {_shape(x)}; it must be [batch, length, heads, width] "
                "without empty dimensions"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{k_name} has shape {_shape(k)}; its batch and width must equal those of "
            f"{q_name} {_shape(q)}"
        )
    expected = (*k.shape[:3], value_width * q.shape[3])
    if v.shape != expected:
        raise ValueError(
            f"v has shape {_shape(v)}; with {q_name} {_shape(q)} and {k_name} {_shape(k)} "
            f"it must be {list(expected)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q_name} has {q.shape[2]} heads, not a multiple of the {k.shape[2]} kv heads of "
            f"{k_name} (shapes {_shape(q)} and {_shape(k)})"
        )


def _check_same_kind(**tensors: Tensor) -> None:
    (first_name, first), *rest = tensors.items()
    if not first.is_floating_point():
        raise ValueError(f"{first_name} has dtype {first.dtype}; it must be floating-point")
    for name, x in rest:
        if x.dtype != first.dtype:
            raise ValueError(f"{name} is {x.dtype} but {first_name} is {first.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device} but {first_name} on {first.device}")


def build_mask(
    query_length: int,
    key_length: int,
    *,
    causal: bool,
    cu_seqlens: Tensor | None,
    query_offset: int | None,
    key_offset: int,
) -> AttentionMask:
    """The mask of a call; `query_offset=None` aligns the last query with the last key.

    Raises:
        ValueError: an offset is no integer that the kernels can count to, cu_seqlens is no strictly
            increasing 1-dim integer tensor from 0, or a query or key position lies outside of it.
    """
    for name, position in (("query_offset", query_offset or 0), ("key_offset", key_offset)):
        if not isinstance(position, Integral) or abs(position) > LARGEST_POSITION:
            raise ValueError(
                f"{name} is {position!r}; it must be an integer of at most {LARGEST_POSITION}"
            )
    if query_offset is None:
        query_offset = key_offset + key_length - query_length
    bounds = None
    if cu_seqlens is not None:
        check_tensors(cu_seqlens=cu_seqlens)
        bounds = _document_bounds(cu_seqlens)
        for name, offset, length in (
            ("query", query_offset, query_length),
            ("key", key_offset, key_length),
        ):
            if offset < 0 or offset + length > bounds[-1]:
                raise ValueError(
                    f"{name}_offset={offset} with {length} positions lies outside of cu_seqlens, "
                    f"which covers 0 to {bounds[-1]}"
                )
    return AttentionMask(query_length, key_length, causal, query_offset, key_offset, bounds)


def _document_bounds(cu_seqlens: Tensor) -> tuple[int, ...]:
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.numel() < 2:
        raise ValueError(
            f"cu_seqlens has shape {_shape(cu_seqlens)} and dtype {cu_seqlens.dtype}; "
            "it must be a 1-dim integer tensor [0, end of first document, ...]"
        )
    bounds = tuple(int(bound) for bound in cu_seqlens.tolist())
    if bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        shown = list(bounds[:8])
        raise ValueError(
            f"cu_seqlens of shape {_shape(cu_seqlens)} starts {shown}; "
            "it must start at 0 and increase strictly"
        )
    return bounds


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which attention inputs like `x` are computed: autocast's when it is on.

    As `scaled_dot_product_attention`, which autocast lowers too; float64 is left alone.
    """
    device = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype
