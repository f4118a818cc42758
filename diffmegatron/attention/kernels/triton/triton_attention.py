"""The Triton backend: the kernels as autograd functions.

Each kernel computes both maps. Several heads of q1 may share a head of q2. With two maps the
forward pass saves `out = out1 - lambda out2` and `out2`, but not `out1`. The backward pass replaces
`out1` by `out + lambda out2`.

In shapes, b is the batch size, s the number of queries, heads the number of query heads of a map,
and e the width of a value.
"""

from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..configuration import Configuration
from ..first_order import first_order
from ..maps import QKV, WholeAttention, map_gradients
from .block_sizes import ChipClass
from .kernel_launch import (
    LOG2_E,
    Problem,
    by_head,
    launch_backward,
    launch_delta,
    launch_forward,
    launch_preprocess,
    problem_of,
    ratio_of,
    row_values,
    same_strides,
)

_DEFAULT = Configuration()


def attend(
    call: AttentionCall,
    configuration: Configuration = _DEFAULT,
    target: ChipClass | None = None,
) -> Tensor:
    """Compute attention with one or two maps, and the headwise norm if the call has one.

    By default `costs.is_one_pass` decides the form of the backward pass. `target` determines the
    default block sizes and how tiles are loaded. If it is None, `block_sizes.target_for` chooses it
    for q.
    """
    problem = problem_of(call, configuration, target)
    v = call.maps.v
    if len(call.maps.queries) == 1:
        heads: Tensor = _OneMap.apply(problem, *call.maps.arguments())
        return heads
    weight, eps, scale = call.norm or (None, 0.0, 1.0)
    if call.norm is not None and weight is None:
        weight = v.new_ones(v.shape[-1], dtype=torch.float32)
    elif weight is not None:
        weight = weight.contiguous()
    out: Tensor = _BothMaps.apply(
        problem, (eps, scale), weight, call.lambda_, *call.maps.arguments()
    )
    return out


def attention_with_lse(
    call: AttentionCall, q: Tensor, k: Tensor, configuration: Configuration = _DEFAULT
) -> tuple[Tensor, Tensor]:
    """Return the output `[b, s, heads, e]` and natural log-sum-exp `[b, s, heads]` of one map."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = _one_map(q, k, call.maps.v, problem_of(call, configuration), wide)
    return out, lse.transpose(1, 2) / LOG2_E


def chunk_gradients(
    call: AttentionCall,
    grad: Tensor,
    whole: WholeAttention,
    configuration: Configuration = _DEFAULT,
) -> QKV:
    """Return the contribution of a chunk of keys to the gradients (see `api.chunk_gradients`)."""
    maps, lambda_, problem = _loadable(call.maps), call.lambda_, problem_of(call, configuration)
    lses = [by_head(lse * LOG2_E) for lse in whole.lses]
    deltas = [by_head(delta) for delta in whole.deltas(grad, lambda_)]
    grads = [grad]
    if lambda_ is not None and ratio_of(maps) > 1:
        grads = map_gradients(grad, lambda_, maps.queries[1].shape[2])
        deltas[1] *= -lambda_
    grads = [same_strides(each.to(maps.v.dtype))[0] for each in grads]
    return launch_backward(maps, grads, lambda_, lses, deltas, problem)


class _BothMaps(torch.autograd.Function):
    """Attention with two maps in one kernel, and the headwise norm unless `norm_weight` is None.

    `norm` is (eps, scale) of the norm. `heads` are q1, k1, q2, k2 and v.
    """

    @staticmethod
    def forward(
        ctx: Any,
        problem: Problem,
        norm: tuple[float, float],
        norm_weight: Tensor | None,
        lambda_: Tensor,
        *heads: Tensor,
    ) -> Tensor:
        maps = _loadable(QKV.of(*heads))
        out, out2 = (maps.v.new_empty(*q.shape[:3], maps.v.shape[3]) for q in maps.queries)
        lses = tuple(row_values(q) for q in maps.queries)
        normed = None if norm_weight is None else torch.empty_like(out)
        launch_forward(maps, lambda_, (out, out2), lses, problem, (norm_weight, normed, *norm))
        ctx.save_for_backward(lambda_, norm_weight, out, out2, *lses, *maps.arguments())
        ctx.problem, ctx.norm = problem, norm
        return out if normed is None else normed

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lambda_, norm_weight, out, out2, lse1, lse2, *heads = ctx.saved_tensors
        (grad,) = same_strides(grad)
        of = launch_preprocess(grad, out, out2, lambda_, (norm_weight, *ctx.norm))
        found = launch_backward(
            QKV.of(*heads), of.grads, lambda_, (lse1, lse2), of.deltas, ctx.problem
        )
        return None, None, of.norm_weight, of.lambda_, *found.arguments()


class _OneMap(torch.autograd.Function):
    """Attention with one map."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = _one_map(q, k, v, problem, v.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = problem
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        (grad,) = same_strides(grad)
        delta = launch_delta(grad, out)
        maps = _loadable(QKV((q,), (k,), v))
        found = launch_backward(maps, (grad,), None, (lse,), (delta,), ctx.problem)
        return None, *found.arguments()


def _one_map(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return one map's output `[b, s, heads, e]` and base-2 log-sum-exp `[b, heads, s]`.

    The output has the dtype `dtype`, and the log-sum-exp fp32, or fp64 for fp64 inputs.
    """
    maps = _loadable(QKV((q,), (k,), v))
    lse = row_values(q)
    out = q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype)
    launch_forward(maps, None, (out,), (lse,), problem)
    return out, lse


def _loadable(maps: QKV) -> QKV:
    """Return `maps` with strides that kernels can load.

    Keys have equal strides, and so have queries with equally many heads.
    """
    if ratio_of(maps) == 1:
        queries = same_strides(*maps.queries)
    else:
        queries = tuple(same_strides(q)[0] for q in maps.queries)
    return QKV(queries, same_strides(*maps.keys), same_strides(maps.v)[0])
