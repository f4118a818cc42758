# mypy: disable-error-code="no-untyped-def"
"""Triton backward kernel for dK and dV; in the one-pass form it also computes dQ.

Map i (1 or 2) is P_i = softmax(S_i), with scores S_i = scale Q_i K_i^T and output O_i = P_i V. The
result of attention is O_1 - lambda O_2. Its gradient is dO, the gradient of S_i is dS_i, and * is
the elementwise product. Both maps share dP = dO V^T:

    delta_i = rowsum(dO * O_i)
    dS_1 = P_1 * (dP - delta_1)     dS_2 = -lambda P_2 * (dP - delta_2)
    dQ_i = scale dS_i K_i           dK_i = scale dS_i^T Q_i
    dV = (P_1 - lambda P_2)^T dO

With one map (MAPS = 1), lambda is zero and dV = P_1^T dO. The kernels compute P_i as
2^(Q_i K_i^T scale_log2 - lse_i), with scale_log2 = scale * log2(e) and the base-2 log-sum-exp
lse_i.

If r = RATIO > 1 heads of the first map share a head of the second, the result of head n is
O_1,n - lambda O_2,m with m = n // r. The maps do not share dP then. With the gradient
dO_2,m = -lambda sum_n dO_n of O_2,m, and delta_2,m = rowsum(dO_2,m * O_2,m), both maps are plain
maps, whose gradients dV the kernel adds.

In the split form this kernel computes dK and dV, and `backward_dq` computes dQ. Both compute the
scores and dP. In the one-pass form this kernel also sums dQ in memory, by atomic additions. The
order of these additions changes from run to run, and so do the last bits of dQ.

A program handles N keys and loops over blocks of M query rows. In shapes, D and DV are the widths
of a query and of a value, rounded up to powers of 2. b is the batch size, s the number of queries,
t the number of keys, h the number of query heads of the first map, and h_kv the number of kv heads.
"""

import triton
import triton.language as tl

from .tiles import Heads, load_rows, load_tile, multiply, opaque, queries_of_keys, store_tile


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
    lse_ptrs,
    delta_ptrs,
    dq_ptrs,
    lambda_,
    row_begin,
    row_end,
    query_start,
    query_stop,
    batch,
    head,
    heads,
    layout,
    scale_log2,
    config: tl.constexpr,
    MAPS: tl.constexpr,
    ONE_PASS: tl.constexpr,
):
    """Add the contributions of the query rows [row_begin, row_end) of one head to dK and dV.

    The sums `dk1` and `dk2` are `[N, D]`, without the factor `scale`, and `dv` is `[N, DV]`. With
    TMA they are `[D, N]` and `[DV, N]`. With ONE_PASS, this function also adds to dQ in memory.
    """
    M: tl.constexpr = config.M
    N: tl.constexpr = config.N
    TMA: tl.constexpr = config.TMA
    for first_row in tl.range(row_begin, row_end, M, disable_licm=config.DISABLE_LICM):
        rows = first_row + tl.arange(0, M)
        visible = (rows[:, None] >= query_start[None, :]) & (rows[:, None] < query_stop[None, :])
        grad = load_tile(grad_source, batch, head, first_row, config.value_width, M, TMA)
        q1 = load_tile(q1_source, batch, head, first_row, config.width, M, TMA)
        q2 = q1
        if MAPS == 2:
            q2 = load_tile(q2_source, batch, head, first_row, config.width, M, TMA)
        if TMA:
            combined = tl.zeros([M, N], dtype=q1.dtype)
            dscores1 = tl.zeros([M, N], dtype=q1.dtype)
            dscores2 = tl.zeros([M, N], dtype=q1.dtype)
            # This condition is always true. Without it, both warpgroups would compute all rows of
            # the products in `_map_gradients` (docs/design/kernels.md, "Products computed twice").
            if first_row < opaque(row_end):
                combined, dscores1, dscores2 = _map_gradients(
                    q1, k1, q2, k2, v, grad, lse_ptrs, delta_ptrs, lambda_, visible,
                    batch, head, heads, first_row, layout, scale_log2, config, MAPS,
                )  # fmt: skip
        else:
            combined, dscores1, dscores2 = _map_gradients(
                q1, k1, q2, k2, v, grad, lse_ptrs, delta_ptrs, lambda_, visible,
                batch, head, heads, first_row, layout, scale_log2, config, MAPS,
            )  # fmt: skip
        dk1 += _sum_over_rows(dscores1, q1, TMA)
        if MAPS == 2:
            dk2 += _sum_over_rows(dscores2, q2, TMA)
        dv += _sum_over_rows(combined, grad, TMA)
        if ONE_PASS:
            _add_dq(dq_ptrs[0], dscores1, k1, batch, head, heads, first_row, layout, config.width)
            if MAPS == 2:
                _add_dq(
                    dq_ptrs[1], dscores2, k2, batch, head, heads, first_row, layout, config.width
                )
    return dk1, dk2, dv


@triton.jit
def _map_gradients(
    q1,
    k1,
    q2,
    k2,
    v,
    grad,
    lse_ptrs,
    delta_ptrs,
    lambda_,
    visible,
    batch,
    head,
    heads,
    first_row,
    layout,
    scale_log2,
    config: tl.constexpr,
    MAPS: tl.constexpr,
):
    """Return P_1 - lambda P_2, dS_1 and dS_2 of one block, each `[M, N]` in the inputs' dtype.

    With MAPS = 1 the results are P_1, dS_1 and again dS_1. `dmap` is dP.
    """
    M: tl.constexpr = config.M
    TRANSPOSED: tl.constexpr = config.TMA
    query_length = layout.query_length
    dmap = _rows_times_keys(grad, v, TRANSPOSED)
    # Rows past the last query get a log-sum-exp of +inf, which makes their weights zero.
    lse1 = load_rows(lse_ptrs[0], batch, head, first_row, query_length, heads, float("inf"), M)
    delta1 = load_rows(delta_ptrs[0], batch, head, first_row, query_length, heads, 0.0, M)
    combined = _weights(q1, k1, lse1, visible, scale_log2, TRANSPOSED)
    dscores1 = (combined * (dmap - delta1[:, None])).to(q1.dtype)
    dscores2 = dscores1
    if MAPS == 2:
        lse2 = load_rows(lse_ptrs[1], batch, head, first_row, query_length, heads, float("inf"), M)
        delta2 = load_rows(delta_ptrs[1], batch, head, first_row, query_length, heads, 0.0, M)
        weights2 = _weights(q2, k2, lse2, visible, scale_log2, TRANSPOSED)
        weights2 *= lambda_
        dscores2 = (weights2 * (delta2[:, None] - dmap)).to(q2.dtype)
        combined -= weights2
    return combined.to(q1.dtype), dscores1, dscores2


@triton.jit
def _sum_over_rows(map_block, tile, TRANSPOSED: tl.constexpr):
    """Return `map_block^T @ tile`: `[M, N], [M, C] -> [N, C]`, with TRANSPOSED `[C, N]`.

    C is D or DV. `map_block` is a block of P_1 - lambda P_2 or dS_i, and `tile` of dO or Q_i.
    """
    if TRANSPOSED:
        product = multiply(tl.trans(tile), map_block)
    else:
        product = multiply(tl.trans(map_block), tile)
    return product


@triton.jit
def _weights(q, k, lse, visible, scale_log2, TRANSPOSED: tl.constexpr):
    """Return a block `[M, N]` of a map: 2^(q k^T scale_log2 - lse), or 0 for hidden pairs."""
    scores = _rows_times_keys(q, k, TRANSPOSED)
    return tl.where(visible, tl.exp2(scores * scale_log2 - lse[:, None]), 0.0)


@triton.jit
def _rows_times_keys(rows, keys, TRANSPOSED: tl.constexpr):
    """Return `rows @ keys^T`: `[M, C], [N, C] -> [M, N]`, where C is D or DV.

    `rows` is a tile of Q_i or dO, and `keys` of K_i or V. With TRANSPOSED the result is the same,
    but the product reads `rows` transposed. Otherwise Triton's pipeliner would reserve one more
    buffer of shared memory, too much for a query width of 128.
    """
    if TRANSPOSED:
        product = tl.trans(multiply(keys, tl.trans(rows)))
    else:
        product = multiply(rows, tl.trans(keys))
    return product


@triton.jit
def _add_dq(dq_ptr, dscores, k, batch, head, heads, first_row, layout, width: tl.constexpr):
    """Add dS K of one block to dQ, a contiguous `[b, s, heads, width]` tensor at `dq_ptr`.

    `kernel_launch.launch_backward` multiplies the complete dQ by `scale`. A TMA reduction, instead
    of atomic additions, would need 32 KiB more shared memory, too much for a query width of 128.
    """
    dq = multiply(dscores, k)
    rows = opaque(first_row) + tl.arange(0, dq.shape[0])
    columns = tl.arange(0, dq.shape[1])
    row_index = tl.cast(batch, tl.int64) * layout.query_length + rows.to(tl.int64)
    row_index = row_index * heads + head
    inside = (rows < layout.query_length)[:, None] & (columns < width)[None, :]
    pointers = dq_ptr + row_index[:, None] * width + columns[None, :]
    tl.atomic_add(pointers, dq, mask=inside, sem="relaxed")


@triton.jit
def dkdv_kernel(
    q1,
    k1,
    q2_source,
    k2,
    v,
    grad,
    grad2,
    lambda_ptr,
    lse_ptrs,
    delta_ptrs,
    dk_ptrs,
    dv_ptr,
    dq_ptrs,
    layout,
    q1_strides,
    q2_strides,
    k_strides,
    v_strides,
    grad_strides,
    grad2_strides,
    scale,
    scale_log2,
    config: tl.constexpr,
    ONE_PASS: tl.constexpr,
):
    """Compute dK and dV of N keys of one kv head; with ONE_PASS, also add to dQ.

    Grid: (blocks of N keys, b * h_kv). A program loops over all query heads of its kv head.

    The inputs are pointers, or with TMA tensor descriptors: `q1` of `[b, s, h, width]`, `q2_source`
    of `[b, s, h / r, width]`, `k1` and `k2` of `[b, t, h_kv, width]`, `v` of
    `[b, t, h_kv, value_width]`, and `grad` (dO) of `[b, s, h, value_width]`. `lambda_ptr` points to
    one number. `lse_ptrs` and `delta_ptrs` point to lse_i and delta_i of each map,
    `[b, heads of the map, s]`. Only r > 1 uses `grad2` (dO_2), `[b, s, h / r, value_width]`, and
    does not use lambda.

    The program stores dK_i at `dk_ptrs` and dV at `dv_ptr`. With ONE_PASS it adds dQ_i, without the
    factor `scale`, at `dq_ptrs`. All gradients are contiguous, with the shapes of k, v and q.
    With MAPS = 1, `q2_source`, `k2` and the second pointer of each pair are not used.
    """
    N: tl.constexpr = config.N
    TMA: tl.constexpr = config.TMA
    # Number of maps that a loop over query heads computes at once.
    AT_ONCE: tl.constexpr = config.MAPS if config.RATIO == 1 else 1
    width: tl.constexpr = config.width
    value_width: tl.constexpr = config.value_width
    first_key = tl.program_id(0) * N
    kv_heads, key_length = layout.kv_heads, layout.key_length
    batch = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    keys = first_key + tl.arange(0, N)
    query_start, query_stop = queries_of_keys(keys, layout, config)
    is_key = keys < key_length
    row_begin = tl.min(tl.where(is_key, query_start, layout.query_length), 0)
    row_end = tl.max(query_stop, 0)
    q1 = Heads(q1, layout.query_length, q1_strides)
    k1 = Heads(k1, layout.key_length, k_strides)
    v = Heads(v, layout.key_length, v_strides)
    grad = Heads(grad, layout.query_length, grad_strides)
    k1_tile = load_tile(k1, batch, kv_head, first_key, width, N, TMA)
    q2, k2_tile = q1, k1_tile
    if config.MAPS == 2:
        q2 = Heads(q2_source, layout.query_length, q2_strides if config.RATIO > 1 else q1_strides)
        k2 = Heads(k2, layout.key_length, k_strides)
    if AT_ONCE == 2:
        k2_tile = load_tile(k2, batch, kv_head, first_key, width, N, TMA)
    v_tile = load_tile(v, batch, kv_head, first_key, value_width, N, TMA)
    ACCUMULATE: tl.constexpr = lse_ptrs[0].dtype.element_ty
    lambda_ = tl.load(lambda_ptr).to(ACCUMULATE)
    D: tl.constexpr = triton.next_power_of_2(width)
    DV: tl.constexpr = triton.next_power_of_2(value_width)
    if TMA:
        dk1 = tl.zeros([D, N], dtype=ACCUMULATE)
        dv = tl.zeros([DV, N], dtype=ACCUMULATE)
    else:
        dk1 = tl.zeros([N, D], dtype=ACCUMULATE)
        dv = tl.zeros([N, DV], dtype=ACCUMULATE)
    dk2 = tl.zeros_like(dk1)
    repeats = layout.heads // kv_heads
    for head in range(kv_head * repeats, (kv_head + 1) * repeats):
        dk1, dk2, dv = _key_block_gradients(
            dk1, dk2, dv, k1_tile, k2_tile, v_tile, q1, q2, grad,
            lse_ptrs, delta_ptrs, dq_ptrs, lambda_, row_begin, row_end, query_start, query_stop,
            batch, head, layout.heads, layout, scale_log2, config, AT_ONCE, ONE_PASS,
        )  # fmt: skip
    _store_keys(dk_ptrs[0], dk1 * scale, batch, kv_head, first_key, layout, width, TMA)
    if config.RATIO > 1:
        grad2 = Heads(grad2, layout.query_length, grad2_strides)
        k2_tile = load_tile(k2, batch, kv_head, first_key, width, N, TMA)
        repeats = repeats // config.RATIO
        dk1 = tl.zeros_like(dk2)
        for head in range(kv_head * repeats, (kv_head + 1) * repeats):
            dk2, dk1, dv = _key_block_gradients(
                dk2, dk1, dv, k2_tile, k2_tile, v_tile, q2, q2, grad2,
                lse_ptrs[1:], delta_ptrs[1:], dq_ptrs[1:], lambda_,
                row_begin, row_end, query_start, query_stop,
                batch, head, layout.heads // config.RATIO, layout, scale_log2, config, 1, ONE_PASS,
            )  # fmt: skip
    if config.MAPS == 2:
        _store_keys(dk_ptrs[1], dk2 * scale, batch, kv_head, first_key, layout, width, TMA)
    _store_keys(dv_ptr, dv, batch, kv_head, first_key, layout, value_width, TMA)


@triton.jit
def _store_keys(
    pointer, tile, batch, kv_head, first_key, layout, width: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Store a tile `[N, C]`, with TRANSPOSED `[C, N]`, of the gradient of keys or values."""
    if TRANSPOSED:
        tile = tl.trans(tile)
    store_tile(pointer, tile, batch, kv_head, first_key, layout.key_length, layout.kv_heads, width)
