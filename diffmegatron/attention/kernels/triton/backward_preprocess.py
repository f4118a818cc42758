# mypy: disable-error-code="no-untyped-def"
"""Triton kernel for the deltas of one or two maps, and for the headwise norm's backward pass.

The result of head n is out_n = O_1,n - lambda O_2,m, where O_1,n and O_2,m are the outputs of
signal head n and of its noise head m. r signal heads share a noise head. dO_n is the gradient of
out_n, and * is the elementwise product:

    delta_1,n = rowsum(dO_n * O_1,n)
    delta_2,m = sum over n of rowsum(dO_n * O_2,m)
    dlambda = -sum(delta_2)

With one map, the delta is rowsum(dO_n * out_n). The norm is RMSNorm(out) * norm_weight * norm_scale
over the channels of each head.

In shapes, b is the batch size, s the number of queries and h the number of signal heads.
"""

import triton
import triton.language as tl

from .tiles import Heads, contiguous_heads, load_tile, store_rows, store_tile


@triton.jit
def preprocess_kernel(
    grad_ptr,
    out_ptr,
    out2_ptr,
    lambda_ptr,
    norm_weight_ptr,
    grad_out_ptr,
    grad_out2_ptr,
    sums_ptr,
    delta1_ptr,
    delta2_ptr,
    heads,
    query_length,
    grad_strides,
    norm_eps,
    norm_scale,
    value_width: tl.constexpr,
    M: tl.constexpr,
    MAPS: tl.constexpr,
    RATIO: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute the deltas of M query rows of one noise head and its r = RATIO signal heads.

    With MAPS = 1, the kernel has only signal heads and stores only delta1. With NORM, also compute
    the gradients of the norm.

    Grid: (blocks of M query rows, b * h / r).

    `grad_ptr` points to dO, or with NORM to the gradient of the norm's result. `out_ptr` points to
    out, and `out2_ptr` to O_2. These tensors are `[b, s, heads of the map, value_width]`.
    `lambda_ptr` points to a number. The program stores the deltas at `delta1_ptr` and `delta2_ptr`,
    `[b, heads of the map, s]`.

    At `sums_ptr`, `[number of programs, columns]`, the program stores one row. The sum of all rows
    has dlambda in its last column. With NORM, it has the gradient of the norm's weight in the
    `value_width` columns before.

    With NORM, the program stores dO at `grad_out_ptr`. `norm_weight_ptr` points to the weight
    `[value_width]`. If r > 1, the program stores dO_2,m = -lambda sum_n dO_n at `grad_out2_ptr`,
    `[b, s, h / r, value_width]`, and rowsum(dO_2,m * O_2,m) in place of delta_2,m.
    """
    ACCUMULATE: tl.constexpr = delta1_ptr.dtype.element_ty
    first_row = tl.program_id(0) * M
    groups = heads // RATIO
    batch = tl.program_id(1) // groups
    group = tl.program_id(1) % groups
    program = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    grads = Heads(grad_ptr, query_length, grad_strides)
    outs = contiguous_heads(out_ptr, query_length, heads, value_width)
    if MAPS == 2:
        lambda_ = tl.load(lambda_ptr).to(ACCUMULATE)
        outs2 = contiguous_heads(out2_ptr, query_length, groups, value_width)
        out2 = load_tile(outs2, batch, group, first_row, value_width, M).to(ACCUMULATE)
        grad_out2 = tl.zeros_like(out2)
        delta2 = tl.zeros([M], dtype=ACCUMULATE)
    WIDTH: tl.constexpr = triton.next_power_of_2(value_width)
    columns = tl.arange(0, WIDTH)
    weight_grad = tl.zeros([WIDTH], dtype=ACCUMULATE)
    for index in range(RATIO):
        head = group * RATIO + index
        grad = load_tile(grads, batch, head, first_row, value_width, M).to(ACCUMULATE)
        out = load_tile(outs, batch, head, first_row, value_width, M).to(ACCUMULATE)
        if NORM:
            weight = tl.load(norm_weight_ptr + columns, mask=columns < value_width, other=0.0)
            rows = first_row + tl.arange(0, M)
            mean_square = tl.sum(out * out, 1) / value_width
            # Rows past the last query are zero. With norm_eps = 0, their rstd would be infinite and
            # their `unit` NaN.
            rstd = tl.where(rows < query_length, 1.0 / tl.sqrt(mean_square + norm_eps), 0.0)
            unit = out * rstd[:, None]
            weight_grad += tl.sum(grad * unit, 0) * norm_scale
            grad_unit = grad * (weight.to(ACCUMULATE) * norm_scale)[None, :]
            projection = tl.sum(grad_unit * unit, 1) / value_width
            grad = (grad_unit - unit * projection[:, None]) * rstd[:, None]
            store_tile(grad_out_ptr, grad, batch, head, first_row, query_length, heads, value_width)
            grad = grad.to(grad_out_ptr.dtype.element_ty).to(ACCUMULATE)
        delta1 = tl.sum(grad * out, 1)
        if MAPS == 2:
            of_noise_head = tl.sum(grad * out2, 1)
            # O_1 is not saved. It is out + lambda O_2.
            delta1 += lambda_ * of_noise_head
            delta2 += of_noise_head
            if RATIO > 1:
                grad_out2 += grad
        store_rows(delta1_ptr, delta1, batch, head, first_row, query_length, heads)
    if MAPS == 2:
        sums = sums_ptr + program * (value_width * NORM + 1)
        if NORM:
            tl.store(sums + columns, weight_grad, mask=columns < value_width)
        tl.store(sums + value_width * NORM, -tl.sum(delta2, 0))
        if RATIO > 1:
            grad_out2 = (grad_out2 * -lambda_).to(grad_out2_ptr.dtype.element_ty)
            store_tile(
                grad_out2_ptr, grad_out2, batch, group, first_row, query_length, groups, value_width
            )
            # The rows of dS_2 add up to zero only if dO_2 and its delta are rounded alike.
            delta2 = tl.sum(grad_out2.to(ACCUMULATE) * out2, 1)
        store_rows(delta2_ptr, delta2, batch, group, first_row, query_length, groups)
