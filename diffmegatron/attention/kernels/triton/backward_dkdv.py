# mypy: disable-error-code="no-untyped-def"
# Parameters of kernels are values of the compiler and have no Python types.
"""Triton backward: dK and dV by key block, and in the one-pass form dQ too.

With P_i the maps and dP = dO V^T, shared by both:

    D_i = rowsum(dO * O_i)      dS1 = P1 (dP - D1)      dS2 = -lambda P2 (dP - D2)
    dV = (P1 - lambda P2)^T dO  dQi = dSi Ki            dKi = dSi^T Qi

Split, this kernel and the one of `backward_dq` compute the scores and dP twice (14d) and are
deterministic; the one-pass form adds dQ up in memory from here (10d), in an order that changes
from run to run. MAPS 1 is the backward of one map alone.
"""

import triton
import triton.language as tl

from .tiles import load_rows, load_tile, multiply, opaque, queries_of_keys, store_tile


@triton.jit
def _key_block_gradients(
    dk1,
    dk2,
    dv,
    k1,
    k2,
    v,
    q1_source,
    q2_source,
    grad_source,
    lse1_ptr,
    lse2_ptr,
    delta1_ptr,
    delta2_ptr,
    dq1_ptr,
    dq2_ptr,
    lambda_,
    row_begin,
    row_end,
    query_start,
    query_stop,
    batch,
    head,
    heads,
    query_length,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_gb,
    stride_gs,
    stride_gh,
    scale_log2,
    width: tl.constexpr,
    value_width: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    MAPS: tl.constexpr,
    ONE_PASS: tl.constexpr,
    TMA: tl.constexpr,
    LICM: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add what the query rows [row_begin, row_end) of one head contribute.

    QKV are `[M, N]`; dK is `[N, D]` and dV `[N, DV]`. With TMA, on Hopper, these are transposed:
    of a product with D rows or more two warpgroups each take a part, and both of its operands lie
    in shared memory.
    """
    for first_row in tl.range(row_begin, row_end, M, disable_licm=not LICM):
        rows = first_row + tl.arange(0, M)
        visible = (rows[:, None] >= query_start[None, :]) & (rows[:, None] < query_stop[None, :])
        grad = load_tile(
            grad_source, batch, head, first_row, query_length,
            stride_gb, stride_gs, stride_gh, value_width, M, DV, TMA,
        )  # fmt: skip
        q1 = load_tile(
            q1_source, batch, head, first_row, query_length,
            stride_qb, stride_qs, stride_qh, width, M, D, TMA,
        )  # fmt: skip
        q2 = q1
        if MAPS == 2:
            q2 = load_tile(
                q2_source, batch, head, first_row, query_length,
                stride_qb, stride_qs, stride_qh, width, M, D, TMA,
            )  # fmt: skip
        if TMA:
            combined = tl.zeros([M, N], dtype=q1.dtype)
            dscores1 = tl.zeros([M, N], dtype=q1.dtype)
            dscores2 = tl.zeros([M, N], dtype=q1.dtype)
            # Always true, which the compiler must not know: to a product whose result it sees reach
            # another product it gives all warps along the rows, and with M = 64, as many as one
            # warpgroup multiplies, two of them would both compute the whole block.
            if first_row < opaque(row_end, INTERPRETED):
                combined, dscores1, dscores2 = _map_gradients(
                    q1, k1, q2, k2, v, grad, lse1_ptr, lse2_ptr, delta1_ptr, delta2_ptr, lambda_,
                    visible, batch, head, first_row, query_length, heads, scale_log2,
                    M, MAPS, TMA, ACCUMULATE, INTERPRETED,
                )  # fmt: skip
        else:
            combined, dscores1, dscores2 = _map_gradients(
                q1, k1, q2, k2, v, grad, lse1_ptr, lse2_ptr, delta1_ptr, delta2_ptr, lambda_,
                visible, batch, head, first_row, query_length, heads, scale_log2,
                M, MAPS, TMA, ACCUMULATE, INTERPRETED,
            )  # fmt: skip
        dk1 += _sum_over_rows(dscores1, q1, TMA, ACCUMULATE, INTERPRETED)
        if MAPS == 2:
            dk2 += _sum_over_rows(dscores2, q2, TMA, ACCUMULATE, INTERPRETED)
        dv += _sum_over_rows(combined, grad, TMA, ACCUMULATE, INTERPRETED)
        if ONE_PASS:
            _add_dq(
                dq1_ptr, dscores1, k1, batch, head, first_row, query_length, heads,
                width, M, D, ACCUMULATE, INTERPRETED,
            )  # fmt: skip
            if MAPS == 2:
                _add_dq(
                    dq2_ptr, dscores2, k2, batch, head, first_row, query_length, heads,
                    width, M, D, ACCUMULATE, INTERPRETED,
                )  # fmt: skip
    return dk1, dk2, dv


@triton.jit
def _map_gradients(
    q1,
    k1,
    q2,
    k2,
    v,
    grad,
    lse1_ptr,
    lse2_ptr,
    delta1_ptr,
    delta2_ptr,
    lambda_,
    visible,
    batch,
    head,
    first_row,
    query_length,
    heads,
    scale_log2,
    M: tl.constexpr,
    MAPS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return P1 - lambda P2, dS1 and dS2 of one block, each `[M, N]` in the inputs' dtype."""
    dmap = _pairs(grad, v, TRANSPOSED, ACCUMULATE, INTERPRETED)
    # Past the end a log-sum-exp of +inf makes every weight zero.
    lse1 = load_rows(lse1_ptr, batch, head, first_row, query_length, heads, float("inf"), M)
    delta1 = load_rows(delta1_ptr, batch, head, first_row, query_length, heads, 0.0, M)
    combined = _weights(q1, k1, lse1, visible, scale_log2, TRANSPOSED, ACCUMULATE, INTERPRETED)
    dscores1 = (combined * (dmap - delta1[:, None])).to(q1.dtype)
    dscores2 = dscores1
    if MAPS == 2:
        lse2 = load_rows(lse2_ptr, batch, head, first_row, query_length, heads, float("inf"), M)
        delta2 = load_rows(delta2_ptr, batch, head, first_row, query_length, heads, 0.0, M)
        weights2 = _weights(q2, k2, lse2, visible, scale_log2, TRANSPOSED, ACCUMULATE, INTERPRETED)
        weights2 *= lambda_
        dscores2 = (weights2 * (delta2[:, None] - dmap)).to(q2.dtype)
        combined -= weights2
    return combined.to(q1.dtype), dscores1, dscores2


@triton.jit
def _sum_over_rows(
    of_map,
    tile,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return map^T tile of `[M, N]` and `[M, D]`: `[N, D]`, or TRANSPOSED `[D, N]`."""
    if TRANSPOSED:
        product = multiply(tl.trans(tile), of_map, ACCUMULATE, INTERPRETED)
    else:
        product = multiply(tl.trans(of_map), tile, ACCUMULATE, INTERPRETED)
    return product


@triton.jit
def _weights(
    q,
    k,
    lse,
    visible,
    scale_log2,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return a map's block `[M, N]`: exp(q k^T - lse of each query), zero where hidden."""
    scores = _pairs(q, k, TRANSPOSED, ACCUMULATE, INTERPRETED)
    return tl.where(visible, tl.exp2(scores * scale_log2 - lse[:, None]), 0.0)


@triton.jit
def _pairs(
    rows,
    keys,
    TRANSPOSED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return rows keys^T `[M, N]` of `[M, D]` and `[N, D]`, TRANSPOSED through its transpose.

    Every product then reads the loop's tiles transposed, and none as they are. In a tile that a
    product reads directly Triton's pipeliner wants a buffer more, for products in flight when the
    next is loaded; here all are waited for before. Without it tiles can be loaded two blocks ahead
    at d = 128, and one block ahead means no overlap: loads are issued at the end of a block.
    """
    if TRANSPOSED:
        product = tl.trans(multiply(keys, tl.trans(rows), ACCUMULATE, INTERPRETED))
    else:
        product = multiply(rows, tl.trans(keys), ACCUMULATE, INTERPRETED)
    return product


@triton.jit
def _add_dq(
    dq_ptr,
    dscores,
    k,
    batch,
    head,
    first_row,
    query_length,
    heads,
    width: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Add dS K of one block to the contiguous `[batch, length, heads, width]`.

    From registers: a reduction by TMA would want 32 KiB of shared memory, for which dK and dV of 64
    keys leave no shared memory at d = 128.
    """
    dq = multiply(dscores, k, ACCUMULATE, INTERPRETED)
    rows = opaque(first_row, INTERPRETED) + tl.arange(0, M)
    columns = tl.arange(0, D)
    row_index = (tl.cast(batch, tl.int64) * query_length + rows.to(tl.int64)) * heads + head
    inside = (rows < query_length)[:, None] & (columns < width)[None, :]
    pointers = dq_ptr + row_index[:, None] * width + columns[None, :]
    tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")


@triton.jit
def dkdv_kernel(
    q1,
    k1,
    q2,
    k2,
    v,
    grad,
    lambda_ptr,
    lse1_ptr,
    lse2_ptr,
    delta1_ptr,
    delta2_ptr,
    dk1_ptr,
    dk2_ptr,
    dv_ptr,
    dq1_ptr,
    dq2_ptr,
    query_start_ptr,
    query_stop_ptr,
    heads,
    kv_heads,
    query_length,
    key_length,
    shift,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_gb,
    stride_gs,
    stride_gh,
    scale,
    scale_log2,
    width: tl.constexpr,
    value_width: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    MAPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ONE_PASS: tl.constexpr,
    TMA: tl.constexpr,
    LICM: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute dK and dV of N keys of one kv head, over all its query heads; ONE_PASS adds dQ.

    Grid: (key blocks, batch * kv_heads).
    """
    first_key = tl.program_id(0) * N
    batch = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    keys = first_key + tl.arange(0, N)
    query_start, query_stop = queries_of_keys(
        keys, query_length, key_length, shift, query_start_ptr, query_stop_ptr, CAUSAL, DOCUMENTS
    )
    is_key = keys < key_length
    row_begin = tl.min(tl.where(is_key, query_start, query_length), 0)
    row_end = tl.max(query_stop, 0)
    k1_tile = load_tile(
        k1, batch, kv_head, first_key, key_length,
        stride_kb, stride_ks, stride_kh, width, N, D, TMA,
    )  # fmt: skip
    k2_tile = k1_tile
    if MAPS == 2:
        k2_tile = load_tile(
            k2, batch, kv_head, first_key, key_length,
            stride_kb, stride_ks, stride_kh, width, N, D, TMA,
        )  # fmt: skip
    v_tile = load_tile(
        v, batch, kv_head, first_key, key_length,
        stride_vb, stride_vs, stride_vh, value_width, N, DV, TMA,
    )  # fmt: skip
    lambda_ = tl.load(lambda_ptr).to(ACCUMULATE)
    if TMA:
        dk1 = tl.zeros([D, N], dtype=ACCUMULATE)
        dv = tl.zeros([DV, N], dtype=ACCUMULATE)
    else:
        dk1 = tl.zeros([N, D], dtype=ACCUMULATE)
        dv = tl.zeros([N, DV], dtype=ACCUMULATE)
    dk2 = tl.zeros_like(dk1)
    repeats = heads // kv_heads
    for head in range(kv_head * repeats, (kv_head + 1) * repeats):
        dk1, dk2, dv = _key_block_gradients(
            dk1, dk2, dv, k1_tile, k2_tile, v_tile, q1, q2, grad,
            lse1_ptr, lse2_ptr, delta1_ptr, delta2_ptr, dq1_ptr, dq2_ptr, lambda_,
            row_begin, row_end, query_start, query_stop, batch, head, heads,
            query_length, stride_qb, stride_qs, stride_qh, stride_gb, stride_gs, stride_gh,
            scale_log2, width, value_width, M, N, D, DV, MAPS, ONE_PASS, TMA, LICM,
            ACCUMULATE, INTERPRETED,
        )  # fmt: skip
    if TMA:
        dk1, dk2, dv = tl.trans(dk1), tl.trans(dk2), tl.trans(dv)
    store_tile(dk1_ptr, dk1 * scale, batch, kv_head, first_key, key_length, kv_heads, width, N, D)
    if MAPS == 2:
        store_tile(
            dk2_ptr, dk2 * scale, batch, kv_head, first_key, key_length, kv_heads, width, N, D
        )
    store_tile(dv_ptr, dv, batch, kv_head, first_key, key_length, kv_heads, value_width, N, DV)
