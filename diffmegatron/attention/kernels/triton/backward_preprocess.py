# mypy: disable-error-code="no-untyped-def"
# Parameters of kernels are values of the compiler and have no Python types.
"""Triton backward, preprocess: delta of both maps, through the headwise RMSNorm if it was fused."""

import triton
import triton.language as tl

from .tiles import load_tile, store_rows, store_tile


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
    stride_gb,
    stride_gs,
    stride_gh,
    norm_eps,
    norm_scale,
    value_width: tl.constexpr,
    M: tl.constexpr,
    DV: tl.constexpr,
    MAPS: tl.constexpr,
    NORM: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Compute D1 and D2 of M rows of one head; with NORM first through the headwise RMSNorm.

    Grid: (row blocks, batch * heads). NORM reads the gradient of the normed output, writes that of
    `out`, and one partial row of the norm weight's gradient per program.
    """
    first_row = tl.program_id(0) * M
    batch = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    stride_head = value_width
    stride_row = heads * stride_head
    stride_batch = tl.cast(query_length, tl.int64) * stride_row
    grad = load_tile(
        grad_ptr, batch, head, first_row, query_length,
        stride_gb, stride_gs, stride_gh, value_width, M, DV, False,
    ).to(ACCUMULATE)  # fmt: skip
    out = load_tile(
        out_ptr, batch, head, first_row, query_length,
        stride_batch, stride_row, stride_head, value_width, M, DV, False,
    ).to(ACCUMULATE)  # fmt: skip
    if NORM:
        columns = tl.arange(0, DV)
        weight = tl.load(norm_weight_ptr + columns, mask=columns < value_width, other=0.0)
        rows = first_row + tl.arange(0, M)
        mean_square = tl.sum(out * out, 1) / value_width
        # Past the end there are zeros, of which an eps of 0 would make NaN.
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
        store_tile(
            grad_out_ptr, grad, batch, head, first_row, query_length, heads, value_width, M, DV
        )
        grad = grad.to(grad_out_ptr.dtype.element_ty).to(ACCUMULATE)
    delta1 = tl.sum(grad * out, 1)
    if MAPS == 2:
        out2 = load_tile(
            out2_ptr, batch, head, first_row, query_length,
            stride_batch, stride_row, stride_head, value_width, M, DV, False,
        )  # fmt: skip
        delta2 = tl.sum(grad * out2.to(ACCUMULATE), 1)
        # out = out1 - lambda out2, so out1 need not be kept.
        delta1 += tl.load(lambda_ptr).to(ACCUMULATE) * delta2
        store_rows(delta2_ptr, delta2, batch, head, first_row, query_length, heads, M)
    store_rows(delta1_ptr, delta1, batch, head, first_row, query_length, heads, M)
