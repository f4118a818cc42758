"""The Triton backend: the kernels as autograd functions.

If q1 and q2 have equally many heads, each kernel computes both maps. If several heads of q1 share a
head of q2, each map has its own kernel launches. With two maps the forward pass saves
`out = out1 - lambda out2` and `out2`, but not `out1`. The backward pass replaces `out1` by
`out + lambda out2`.

In shapes, b is the batch size, s the number of queries, heads the number of query heads of a map,
and e the width of a value.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..call import AttentionCall
from ..first_order import first_order
from ..maps import QKV, WholeAttention, combine_maps, map_gradients
from .block_sizes import ChipClass
from .kernel_launch import (
    LOG2_E,
    Problem,
    by_head,
    launch_backward,
    launch_forward,
    launch_preprocess,
    problem_of,
    row_values,
    same_strides,
)


def attend(
    call: AttentionCall, *, one_pass: bool | None = None, target: ChipClass | None = None
) -> Tensor:
    """Compute attention with one or two maps, and the headwise norm if the call has one.

    With `one_pass`, the backward kernel of dK and dV also computes dQ. If it is None,
    `costs.default_one_pass` decides. `target` determines the block sizes and how tiles are loaded.
    If it is None, `block_sizes.target_of` chooses it for the GPU and the dtype of q.
    """
    problem = problem_of(call, one_pass, target)
    queries, keys, v = call.maps
    if len(queries) == 1 or queries[0].shape[2] != queries[1].shape[2]:
        heads: Tensor = _SeparateMaps.apply(problem, call.lambda_, v, *queries, *keys)
        return heads if call.norm is None else call.norm.apply_to(heads)
    weight, eps, scale = call.norm or (None, 0.0, 1.0)
    if call.norm is not None and weight is None:
        weight = v.new_ones(v.shape[-1], dtype=torch.float32)
    elif weight is not None:
        weight = weight.contiguous()
    out: Tensor = _BothMaps.apply(
        problem, (eps, scale), weight, call.lambda_, *call.maps.arguments()
    )
    return out


def attention_with_lse(call: AttentionCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output `[b, s, heads, e]` and natural log-sum-exp `[b, s, heads]` of one map."""
    out, lse = _one_map(q, k, call.maps.v, problem_of(call, None, None))
    return out, lse.transpose(1, 2) / LOG2_E


def chunk_gradients(call: AttentionCall, grad: Tensor, whole: WholeAttention) -> QKV:
    """Return the contribution of a chunk of keys to the gradients (see `api.chunk_gradients`)."""
    lses = [by_head(lse * LOG2_E) for lse in whole.lses]
    deltas = whole.deltas(grad, call.lambda_)
    problem = problem_of(call, None, None)
    return _gradients(grad, call.maps, call.lambda_, lses, deltas, problem)


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
        q, v = maps.queries[0], maps.v
        out, out2 = (v.new_empty(*q.shape[:3], v.shape[3]) for _ in range(2))
        lses = (row_values(q), row_values(q))
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
        grad_out, deltas, dweight = launch_preprocess(
            grad, out, out2, lambda_, (norm_weight, *ctx.norm)
        )
        found = launch_backward(
            QKV.of(*heads), grad_out, lambda_, (lse1, lse2), deltas, ctx.problem
        )
        dlambda = -deltas[1].sum().to(lambda_.dtype)
        return None, None, dweight, dlambda, *found.arguments()


class _SeparateMaps(torch.autograd.Function):
    """Attention with separate kernel launches for each map.

    `queries_and_keys` are q and k for one map, and q1, q2, k1, k2 for two maps.
    """

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, lambda_: Tensor | None, v: Tensor, *queries_and_keys: Tensor
    ) -> Tensor:
        count = len(queries_and_keys) // 2
        pairs = zip(queries_and_keys[:count], queries_and_keys[count:], strict=True)
        outs, lses = zip(*(_one_map(q, k, v, problem) for q, k in pairs), strict=True)
        out = combine_maps(outs, lambda_).to(v.dtype)
        out2 = None if lambda_ is None else outs[1].to(v.dtype)
        ctx.save_for_backward(lambda_, v, out, out2, *lses, *queries_and_keys)
        ctx.problem = problem
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lambda_, v, out, out2, *of_maps = ctx.saved_tensors
        count = len(of_maps) // 3
        lses, queries, keys = (tuple(of_maps[i * count : (i + 1) * count]) for i in range(3))
        rows = tuple(lse.transpose(1, 2) for lse in lses)
        deltas = WholeAttention(out, out2, rows).deltas(grad, lambda_)
        found = _gradients(grad, QKV(queries, keys, v), lambda_, lses, deltas, ctx.problem)
        dlambda = None if lambda_ is None else -deltas[1].sum().to(lambda_.dtype)
        return None, dlambda, found.v, *found.queries, *found.keys


def _one_map(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return one map's output `[b, s, heads, e]` and base-2 log-sum-exp `[b, heads, s]`.

    Both are fp32, or fp64 for fp64 inputs.
    """
    maps = _loadable(QKV((q,), (k,), v))
    lse = row_values(q)
    out = lse.new_empty(*q.shape[:3], v.shape[3])
    launch_forward(maps, None, (out,), (lse,), problem)
    return out, lse


def _loadable(maps: QKV) -> QKV:
    """Return `maps` with strides that kernels can load: equal for q1 and q2, and for k1 and k2."""
    return QKV(same_strides(*maps.queries), same_strides(*maps.keys), same_strides(maps.v)[0])


def _gradients(
    grad: Tensor,
    maps: QKV,
    lambda_: Tensor | None,
    lses: Sequence[Tensor],
    deltas: tuple[Tensor, ...],
    problem: Problem,
) -> QKV:
    """Return the gradients of queries, keys and values, given the gradient of the result.

    For each map, `lses` has base-2 log-sum-exps `[b, heads, s]`, and `deltas` has the deltas
    `[b, s, heads]` of `WholeAttention.deltas`.
    """
    first, last = maps.queries[0], maps.queries[-1]
    if lambda_ is not None and first.shape == last.shape:
        (grad,) = same_strides(grad.to(maps.v.dtype))
        of_maps = [by_head(x) for x in deltas]
        return launch_backward(_loadable(maps), grad, lambda_, lses, of_maps, problem)
    factors = [1.0] if lambda_ is None else [1.0, -lambda_.detach()]
    (v,) = same_strides(maps.v)
    found = []
    for q, k, of_map, lse, delta, factor in zip(
        *maps[:2], map_gradients(grad, lambda_, last.shape[2]), lses, deltas, factors, strict=True
    ):
        (of_map,) = same_strides(of_map.to(v.dtype))
        one, rows = _loadable(QKV((q,), (k,), v)), ((lse,), (by_head(factor * delta),))
        found.append(launch_backward(one, of_map, None, *rows, problem))
    dqs, dks = (tuple(x for of_map in found for x in of_map[i]) for i in (0, 1))
    dv, *others = (of_map.v for of_map in found)
    return QKV(dqs, dks, sum(others, dv))
