"""Launch functions of the Triton kernels, with their grids, block sizes and arguments.

Map i is softmax(softmax_scale q_i k_i^T), with the output O_i. The result is O_1 - lambda O_2, or
with one map O_1. dO is the gradient of the result. Several heads of the first map (signal heads)
may share a head of the second map (noise head). In shapes, b is the batch size, s the number of
query rows and h the number of heads of a map.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..call import AttentionCall
from ..configuration import BlockSizes, Configuration
from ..costs import is_one_pass
from ..maps import QKV
from ..masks import AttentionMask
from .backward_dkdv import dkdv_kernel
from .backward_dq import dq_kernel
from .backward_preprocess import preprocess_kernel
from .block_sizes import ChipClass, dkdv_blocks, dq_blocks, forward_blocks, target_for
from .forward import forward_kernel
from .tiles import Config, Layout

LOG2_E = math.log2(math.e)
PREPROCESS_ROWS = 32
# CUDA's limit for the second dimension of a grid, which is batch * heads here.
MOST_HEADS = 65535


class Problem(NamedTuple):
    """Settings that all kernels of one attention call share.

    `one_pass` is True if the backward kernel of dK and dV also computes dQ, and
    `triton_attention.attend` describes `target` and `configuration`.
    """

    softmax_scale: float
    mask: AttentionMask
    one_pass: bool
    target: ChipClass
    configuration: Configuration

    @property
    def tma(self) -> bool:
        """Value of `Config.TMA`: True to load q, k, v and dO by the Tensor Memory Accelerator."""
        return self.target is ChipClass.HOPPER

    @property
    def has_tables(self) -> bool:
        """Value of `Config.TABLES`: True if the mask has document boundaries or a window."""
        return self.mask.cu_seqlens is not None or self.mask.window is not None


def problem_of(
    call: AttentionCall, configuration: Configuration, target: ChipClass | None = None
) -> Problem:
    """Return the settings for `call`; `triton_attention.attend` describes the arguments."""
    q = call.maps.queries[0]
    programs = q.shape[0] * _dq_heads(call.maps)
    if programs > MOST_HEADS:
        raise ValueError(
            f"queries of shape {list(q.shape)} have {programs} heads in all; the triton backend "
            f"takes {MOST_HEADS} at once, batch times heads"
        )
    one_pass = is_one_pass(
        q.shape[-1], torch.are_deterministic_algorithms_enabled(), configuration.one_pass
    )
    target = target_for(q) if target is None else target
    return Problem(call.scale, call.mask, one_pass, target, configuration)


def launch_forward(
    maps: QKV,
    lambda_: Tensor | None,
    outs: Sequence[Tensor],
    lses: Sequence[Tensor],
    problem: Problem,
    norm: tuple[Tensor | None, Tensor | None, float, float] = (None, None, 0.0, 1.0),
) -> None:  # fmt: skip
    """Launch `forward_kernel`, which writes `outs`, `lses` and the normalised result.

    `outs` is (result,) with one map, and (result, O_2) with two. For each map, `lses` has a tensor
    `[b, h, s]` for base-2 log-sum-exps. `norm` is (weight, tensor for the normalised result, eps,
    factor of the normalised result); weight and tensor are None without a headwise norm.
    """
    q, k, v = maps.queries[0], maps.keys[0], maps.v
    batch, length, heads, width = q.shape
    default = forward_blocks(width, q.dtype, problem.target)
    blocks = problem.configuration.blocks("forward", default)
    norm_weight, normed, norm_eps, norm_scale = norm
    intervals = problem.mask.key_intervals(q.device) if problem.has_tables else (None, None)
    with on_device(q):
        forward_kernel[(triton.cdiv(length, blocks.M), batch * heads // ratio_of(maps))](
            *_sources(maps, (), blocks, problem.tma), lambda_, *_pair(outs), _pair(lses),
            norm_weight, normed, _layout(q, k, problem.mask, intervals),
            *_strides(q, maps.queries[-1], k, v),
            problem.softmax_scale * LOG2_E, norm_eps, norm_scale,
            NORM=norm_weight is not None, **_constants(maps, blocks, problem),
        )  # fmt: skip


class Preprocessed(NamedTuple):
    """Results of `preprocess_kernel`.

    `grads` is (dO,), or (dO, dO_2) if signal heads share a noise head. dO_2 is the gradient of O_2.
    `deltas` has for each map the tensor `[b, h, s]` that `launch_backward` needs. `norm_weight` is
    the gradient of the norm's weight, or None without a norm, and `lambda_` the gradient of lambda.
    """

    grads: tuple[Tensor, ...]
    deltas: tuple[Tensor, Tensor]
    norm_weight: Tensor | None
    lambda_: Tensor


def launch_preprocess(
    grad: Tensor,
    out: Tensor,
    out2: Tensor,
    lambda_: Tensor,
    norm: tuple[Tensor | None, float, float],
) -> Preprocessed:
    """Launch `preprocess_kernel`.

    `grad` is the gradient of the normalised result, or dO without a headwise norm. `out` is the
    result before the norm, and `out2` is O_2. `norm` is (weight, eps, factor of the normalised
    result); the weight is None without a norm.
    """
    norm_weight, norm_eps, norm_scale = norm
    delta1, delta2 = row_values(out), row_values(out2)
    batch, length, heads, width = out.shape
    noise_heads = out2.shape[2]
    rows = _preprocess_rows(width)
    grid = (triton.cdiv(length, rows), batch * noise_heads)
    grad_out = grad if norm_weight is None else torch.empty_like(out)
    grad_out2 = None if heads == noise_heads else torch.empty_like(out2)
    columns = 1 if norm_weight is None else width + 1
    sums = delta1.new_empty(grid[0] * grid[1], columns)
    with on_device(out):
        preprocess_kernel[grid](
            grad, out, out2, lambda_, norm_weight, grad_out, grad_out2, sums,
            delta1, delta2, heads, length, grad.stride()[:3], norm_eps, norm_scale,
            value_width=width, M=rows, MAPS=2, RATIO=heads // noise_heads,
            NORM=norm_weight is not None, num_warps=8,
        )  # fmt: skip
    totals = sums.sum(0)
    weight_grad = None if norm_weight is None else totals[:-1].to(norm_weight.dtype)
    grads = (grad_out,) if grad_out2 is None else (grad_out, grad_out2)
    return Preprocessed(grads, (delta1, delta2), weight_grad, totals[-1].to(lambda_.dtype))


def launch_delta(grad: Tensor, out: Tensor) -> Tensor:
    """Launch `preprocess_kernel` for one map, and return rowsum(dO * out), `[b, h, s]`.

    `grad` is dO, and `out` the contiguous result.
    """
    batch, length, heads, width = out.shape
    delta, rows = row_values(out), _preprocess_rows(width)
    with on_device(out):
        preprocess_kernel[(triton.cdiv(length, rows), batch * heads)](
            grad, out, None, None, None, None, None, None, delta, None,
            heads, length, grad.stride()[:3], 0.0, 1.0,
            value_width=width, M=rows, MAPS=1, RATIO=1, NORM=False, num_warps=8,
        )  # fmt: skip
    return delta


def _preprocess_rows(width: int) -> int:
    # With values of more than 256 columns, as many rows would not fit the registers.
    return PREPROCESS_ROWS if width <= 256 else PREPROCESS_ROWS // 2


def launch_backward(
    maps: QKV,
    grads: Sequence[Tensor],
    lambda_: Tensor | None,
    lses: Sequence[Tensor],
    deltas: Sequence[Tensor],
    problem: Problem,
) -> QKV:
    """Launch the backward kernels, and return the gradients of queries, keys and values.

    `grads` is (dO,), or (dO, dO_2) if signal heads share a noise head, where dO_2 is the gradient
    of O_2. For each map, `lses` has a tensor `[b, h, s]` of base-2 log-sum-exps. `deltas` has
    tensors `[b, h, s]` of rowsum(dO * O_i), or with dO_2 of rowsum(dO_2 * O_2). `lambda_` is None
    with one map.
    """
    q, k, v = maps.queries[0], maps.keys[0], maps.v
    batch, length, _, width = q.shape
    key_length, kv_heads = k.shape[1:3]
    grad, grad2 = grads[0], grads[-1]
    # With one map the kernels load a lambda but do not use it, so pass any number.
    lambda_ = deltas[0] if lambda_ is None else lambda_
    if problem.one_pass:
        dqs = [deltas[0].new_zeros(x.shape) for x in maps.queries]
    else:
        dqs = [torch.empty(x.shape, dtype=q.dtype, device=q.device) for x in maps.queries]
    dks = [torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in maps.keys]
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    none, mask, has_tables = (None, None), problem.mask, problem.has_tables
    rows = (lambda_, _pair(lses), _pair(deltas))
    strides = _strides(q, maps.queries[-1], k, v, grad, grad2)
    shared = (*strides, problem.softmax_scale, problem.softmax_scale * LOG2_E)
    with on_device(q):
        default = dkdv_blocks(width, q.dtype, problem.target, problem.one_pass)
        blocks = problem.configuration.blocks("dkdv", default)
        intervals = mask.query_intervals(q.device) if has_tables else none
        dkdv_kernel[(triton.cdiv(key_length, blocks.N), batch * kv_heads)](
            *_sources(maps, (grad, grad2), blocks, problem.tma), *rows,
            _pair(dks), dv, _pair(dqs) if problem.one_pass else none,
            _layout(q, k, mask, intervals), *shared,
            ONE_PASS=problem.one_pass, **_constants(maps, blocks, problem),
        )  # fmt: skip
        if problem.one_pass:
            dqs = [
                torch.mul(dq, problem.softmax_scale, out=torch.empty_like(dq, dtype=q.dtype))
                for dq in dqs
            ]
        else:
            default = dq_blocks(width, q.dtype, problem.target, ratio_of(maps) > 1)
            blocks = problem.configuration.blocks("dq", default)
            intervals = mask.key_intervals(q.device) if has_tables else none
            dq_kernel[(triton.cdiv(length, blocks.M), batch * _dq_heads(maps))](
                *_sources(maps, (grad, grad2), blocks, problem.tma), *rows,
                _pair(dqs), _layout(q, k, mask, intervals), *shared,
                **_constants(maps, blocks, problem),
            )  # fmt: skip
    return QKV(tuple(dqs), tuple(dks), dv)


def ratio_of(maps: QKV) -> int:
    """Return the number of signal heads that share a noise head; 1 with one map."""
    return maps.queries[0].shape[2] // maps.queries[-1].shape[2]


def _dq_heads(maps: QKV) -> int:
    """Return the number of heads that the grid of `dq_kernel` has for each batch row."""
    counts = [q.shape[2] for q in maps.queries]
    return counts[0] if ratio_of(maps) == 1 else sum(counts)


def _pair(of_maps: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return (*of_maps, None)[:2]


def _layout(
    q: Tensor, k: Tensor, mask: AttentionMask, intervals: tuple[Tensor | None, Tensor | None]
) -> Layout:
    shift = mask.query_offset - mask.key_offset
    return Layout(*intervals, q.shape[2], k.shape[2], q.shape[1], k.shape[1], shift)


def _strides(*tensors: Tensor) -> list[tuple[int, ...]]:
    return [x.stride()[:3] for x in tensors]


def _sources(maps: QKV, grads: Sequence[Tensor], blocks: BlockSizes, tma: bool) -> list[Any]:
    """Return q1, k1, q2, k2, v, and the `grads`; with `tma` as tensor descriptors.

    With one map, q1 and k1 also take the places of q2 and k2, which the kernels do not use.
    """
    tensors = [maps.queries[0], maps.keys[0], maps.queries[-1], maps.keys[-1], maps.v, *grads]
    if not tma:
        return tensors
    rows = (blocks.M, blocks.N, blocks.M, blocks.N, blocks.N, blocks.M, blocks.M)
    return [_descriptor(x, row_count) for x, row_count in zip(tensors, rows, strict=False)]


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Return a descriptor of x `[b, length, heads, width]`; a load reads `rows` rows of a head."""
    by_head = x.transpose(1, 2)
    block = [1, 1, rows, triton.next_power_of_2(x.shape[3])]
    return TensorDescriptor(by_head, list(by_head.shape), list(by_head.stride()), block)


def _constants(maps: QKV, blocks: BlockSizes, problem: Problem) -> dict[str, Any]:
    config = Config(
        width=maps.queries[0].shape[3],
        value_width=maps.v.shape[3],
        M=blocks.M,
        N=blocks.N,
        MAPS=len(maps.queries),
        RATIO=ratio_of(maps),
        CAUSAL=problem.mask.causal,
        TABLES=problem.has_tables,
        TMA=problem.tma,
        DISABLE_LICM=not blocks.licm,
    )
    launch = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    return {"config": config, **launch}


def same_strides(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, or contiguous copies of all if one has an unsuitable address or stride.

    The kernels need equal strides of all tensors, and a last stride of 1. For TMA, the address and
    the other strides must be multiples of 16 bytes, and no stride may be 0. All conditions are
    checked on every chip.
    """
    first = tensors[0]
    step = 16 // first.element_size()
    if all(
        x.stride() == first.stride()
        and x.stride(3) == 1
        and not any(stride % step or stride == 0 for stride in x.stride()[:3])
        and x.data_ptr() % 16 == 0
        for x in tensors
    ):
        return tensors
    return tuple(x.clone(memory_format=torch.contiguous_format) for x in tensors)


def row_values(q: Tensor) -> Tensor:
    """Return an uninitialised fp32 tensor `[b, h, s]`: one number per head and row of q.

    It is fp64 if q is fp64.
    """
    batch, length, heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(batch, heads, length, dtype=dtype)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which x's device is current, because Triton launches kernels there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def by_head(rows: Tensor) -> Tensor:
    """Rearrange `[b, s, h]` to the kernels' contiguous `[b, h, s]`."""
    return rows.transpose(1, 2).contiguous()
