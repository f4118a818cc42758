# mypy: disable-error-code="no-untyped-def"
"""Triton kernel for the deltas of two maps, and for the backward pass of the headwise norm.

The delta of map i is rowsum(dO * O_i). O_i is the output of the map, dO is the gradient of
out = O_1 - lambda O_2, and * is the elementwise product. The norm is
RMSNorm(out) * norm_weight * norm_scale over the channels of each head.

In shapes, b is the batch size, s the number of queries and h the number of query heads.
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
    grad_weight_ptr,
    delta1_ptr,
    delta2_ptr,
    heads,
    query_length,
    grad_strides,
    norm_eps,
    norm_scale,
    value_width: tl.constexpr,
    M: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute the deltas of M query rows of one head; with NORM also the gradients of the norm.

    Grid: (blocks of M query rows, b * h).

    `grad_ptr` points to dO, or with NORM to the gradient of the norm's result. `out_ptr` points to
    out and `out2_ptr` to O_2. These tensors are `[b, s, h, value_width]`. `lambda_ptr` points to a
    number. The program stores the deltas at `delta1_ptr` and `delta2_ptr`, `[b, h, s]`.

    Only NORM uses the other pointers. `norm_weight_ptr` points to the weight `[value_width]`. The
    program stores dO at `grad_out_ptr`. At `grad_weight_ptr`, `[number of programs, value_width]`,
    it stores one row. The sum of all rows is the gradient of the weight.
    """
    ACCUMULATE: tl.constexpr = delta1_ptr.dtype.element_ty
    first_row = tl.program_id(0) * M
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    grad = Heads(grad_ptr, query_length, grad_strides)
    out = contiguous_heads(out_ptr, query_length, heads, value_width)
    out2 = contiguous_heads(out2_ptr, query_length, heads, value_width)
    grad = load_tile(grad, batch, head, first_row, value_width, M).to(ACCUMULATE)
    out = load_tile(out, batch, head, first_row, value_width, M).to(ACCUMULATE)
    if NORM:
        columns = tl.arange(0, out.shape[1])
        weight = tl.load(norm_weight_ptr + columns, mask=columns < value_width, other=0.0)
        rows = first_row + tl.arange(0, M)
        mean_square = tl.sum(out * out, 1) / value_width
        # Rows past the last query are zero. With norm_eps = 0, their rstd would be infinite and
        # their `unit` NaN.
        rstd = tl.where(rows < query_length, 1.0 / tl.sqrt(mean_square + norm_eps), 0.0)
        unit = out * rstd[:, None]
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(
            grad_weight_ptr + program.to(tl.int64) * value_width + columns,
            tl.sum(grad * unit, 0) * norm_scale,
            mask=columns < value_width,
        )
        grad_unit = grad * (weight.to(ACCUMULATE) * norm_scale)[None, :]
        projection = tl.sum(grad_unit * unit, 1) / value_width
        grad = (grad_unit - unit * projection[:, None]) * rstd[:, None]
        store_tile(grad_out_ptr, grad, batch, head, first_row, query_length, heads, value_width)
        grad = grad.to(grad_out_ptr.dtype.element_ty).to(ACCUMULATE)
    delta1 = tl.sum(grad * out, 1)
    out2 = load_tile(out2, batch, head, first_row, value_width, M)
    delta2 = tl.sum(grad * out2.to(ACCUMULATE), 1)
    # So far delta1 is rowsum(dO * out). Add lambda delta2, because O_1 = out + lambda O_2.
    delta1 += tl.load(lambda_ptr).to(ACCUMULATE) * delta2
    store_rows(delta2_ptr, delta2, batch, head, first_row, query_length, heads)
    store_rows(delta1_ptr, delta1, batch, head, first_row, query_length, heads)
