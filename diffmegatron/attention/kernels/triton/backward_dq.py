# mypy: disable-error-code="no-untyped-def"
"""Triton backward kernel for dQ, used if the kernel of dK and dV does not also compute dQ.

The equations and their symbols are in `backward_dkdv`. A program handles M query rows and loops
over blocks of N keys. In shapes, D is the width of a query, rounded up to a power of 2. b is the
batch size, s the number of queries, t the number of keys, h the number of query heads, and h_kv the
number of kv heads.
"""

import triton
import triton.language as tl

from .tiles import Heads, keys_of_rows, load_rows, load_tile, multiply, store_tile


@triton.jit
def _dq_of_block(
    dq1,
    dq2,
    q1,
    q2,
    grad,
    k1_source,
    k2_source,
    v_source,
    lse1,
    lse2,
    delta1,
    delta2,
    lambda_,
    key_begin,
    key_end,
    row_start,
    row_stop,
    batch,
    kv_head,
    scale_log2,
    config: tl.constexpr,
    MAPS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add the contributions of the keys [key_begin, key_end) to dQ1 and dQ2, and return the sums.

    The sums `dq1` and `dq2` are `[M, D]`, without the factor `scale`. With MASKED, each row sees
    only its own keys [row_start, row_stop). Otherwise it sees all keys of the loop.
    """
    N: tl.constexpr = config.N
    TMA: tl.constexpr = config.TMA
    for first_key in tl.range(key_begin, key_end, N, disable_licm=config.DISABLE_LICM):
        keys = first_key + tl.arange(0, N)
        visible = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_stop[:, None])
        v = load_tile(v_source, batch, kv_head, first_key, config.value_width, N, TMA)
        dmap = multiply(grad, tl.trans(v))
        k1 = load_tile(k1_source, batch, kv_head, first_key, config.width, N, TMA)
        weights = tl.exp2(multiply(q1, tl.trans(k1)) * scale_log2 - lse1[:, None])
        if MASKED:
            weights = tl.where(visible, weights, 0.0)
        dscores = (weights * (dmap - delta1[:, None])).to(k1.dtype)
        dq1 += multiply(dscores, k1)
        if MAPS == 2:
            k2 = load_tile(k2_source, batch, kv_head, first_key, config.width, N, TMA)
            weights = tl.exp2(multiply(q2, tl.trans(k2)) * scale_log2 - lse2[:, None])
            if MASKED:
                weights = tl.where(visible, weights, 0.0)
            dscores = (weights * (delta2[:, None] - dmap) * lambda_).to(k2.dtype)
            dq2 += multiply(dscores, k2)
    return dq1, dq2


@triton.jit
def _dq_of_rows(
    q1,
    q2,
    k1,
    k2,
    v,
    grad,
    lambda_,
    lse_ptrs,
    delta_ptrs,
    dq_ptrs,
    batch,
    head,
    heads,
    first_row,
    layout,
    scale,
    scale_log2,
    config: tl.constexpr,
    MAPS: tl.constexpr,
):
    """Compute dQ of M query rows of one head, for one map or for two maps of `heads` heads each.

    q1, q2, k1, k2, v and grad are `Heads`. With MAPS = 1, q2, k2 and the second pointer of each
    pair are not used.
    """
    M: tl.constexpr = config.M
    TMA: tl.constexpr = config.TMA
    width: tl.constexpr = config.width
    query_length = layout.query_length
    kv_head = head // (heads // layout.kv_heads)
    rows = tl.minimum(first_row + tl.arange(0, M), query_length - 1)
    row_start, row_stop = keys_of_rows(rows, layout, config)
    q1_tile = load_tile(q1, batch, head, first_row, width, M, TMA)
    grad_tile = load_tile(grad, batch, head, first_row, config.value_width, M, TMA)
    # Rows past the last query get a log-sum-exp of +inf, which makes their weights zero.
    lse1 = load_rows(lse_ptrs[0], batch, head, first_row, query_length, heads, float("inf"), M)
    delta1 = load_rows(delta_ptrs[0], batch, head, first_row, query_length, heads, 0.0, M)
    q2_tile, lse2, delta2 = q1_tile, lse1, delta1
    if MAPS == 2:
        q2_tile = load_tile(q2, batch, head, first_row, width, M, TMA)
        lse2 = load_rows(lse_ptrs[1], batch, head, first_row, query_length, heads, float("inf"), M)
        delta2 = load_rows(delta_ptrs[1], batch, head, first_row, query_length, heads, 0.0, M)
    ACCUMULATE: tl.constexpr = lse_ptrs[0].dtype.element_ty
    dq1 = tl.zeros(q1_tile.shape, dtype=ACCUMULATE)
    dq2 = tl.zeros(q1_tile.shape, dtype=ACCUMULATE)
    key_begin = tl.min(row_start, 0)
    key_end = tl.max(row_stop, 0)
    unmasked_end = key_begin
    TABLES: tl.constexpr = config.TABLES
    if not TABLES:
        # Every row sees all keys before `unmasked_end`, so the blocks of these keys need no mask.
        unmasked_end = tl.min(row_stop, 0) // config.N * config.N
        dq1, dq2 = _dq_of_block(
            dq1, dq2, q1_tile, q2_tile, grad_tile, k1, k2, v, lse1, lse2, delta1, delta2, lambda_,
            key_begin, unmasked_end, row_start, row_stop, batch, kv_head, scale_log2,
            config, MAPS, False,
        )  # fmt: skip
    dq1, dq2 = _dq_of_block(
        dq1, dq2, q1_tile, q2_tile, grad_tile, k1, k2, v, lse1, lse2, delta1, delta2, lambda_,
        unmasked_end, key_end, row_start, row_stop, batch, kv_head, scale_log2, config, MAPS, True,
    )  # fmt: skip
    store_tile(dq_ptrs[0], dq1 * scale, batch, head, first_row, query_length, heads, width)
    if MAPS == 2:
        store_tile(dq_ptrs[1], dq2 * scale, batch, head, first_row, query_length, heads, width)


@triton.jit
def dq_kernel(
    q1,
    k1,
    q2_source,
    k2_source,
    v,
    grad,
    grad2,
    lambda_ptr,
    lse_ptrs,
    delta_ptrs,
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
):
    """Compute dQ of M query rows of one head, for each of the MAPS maps.

    Grid: (blocks of M query rows, b * h). If r = RATIO heads of the first map share a head of the
    second, the grid is (blocks of M query rows, b * (h + h / r)), and a program computes dQ of one
    head of one map.

    The inputs are pointers, or with TMA tensor descriptors: `q1` of `[b, s, h, width]`, `q2_source`
    of `[b, s, h / r, width]`, `k1` and `k2_source` of `[b, t, h_kv, width]`, `v` of
    `[b, t, h_kv, value_width]`, and `grad` (dO) of `[b, s, h, value_width]`. `lambda_ptr` points to
    one number. `lse_ptrs` and `delta_ptrs` point to lse_i and delta_i of each map,
    `[b, heads of the map, s]`. The program stores dQ_i at `dq_ptrs`, in contiguous tensors with the
    shapes of q1 and q2. With MAPS = 1, `q2_source`, `k2_source` and the second pointer of each pair
    are not used. Only r > 1 uses `grad2` and its delta, and does not use lambda (`backward_dkdv`).
    """
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * config.M
    query_length = layout.query_length
    q1 = Heads(q1, query_length, q1_strides)
    k1 = Heads(k1, layout.key_length, k_strides)
    v = Heads(v, layout.key_length, v_strides)
    grad = Heads(grad, query_length, grad_strides)
    ACCUMULATE: tl.constexpr = lse_ptrs[0].dtype.element_ty
    lambda_ = tl.load(lambda_ptr).to(ACCUMULATE)
    if config.RATIO == 1:
        q2, k2 = q1, k1
        if config.MAPS == 2:
            q2 = Heads(q2_source, query_length, q1_strides)
            k2 = Heads(k2_source, layout.key_length, k_strides)
        batch = tl.program_id(1) // layout.heads
        head = tl.program_id(1) % layout.heads
        _dq_of_rows(
            q1, q2, k1, k2, v, grad, lambda_, lse_ptrs, delta_ptrs, dq_ptrs,
            batch, head, layout.heads, first_row, layout, scale, scale_log2, config, config.MAPS,
        )  # fmt: skip
    else:
        q2 = Heads(q2_source, query_length, q2_strides)
        k2 = Heads(k2_source, layout.key_length, k_strides)
        grad2 = Heads(grad2, query_length, grad2_strides)
        noise_heads = layout.heads // config.RATIO
        batch = tl.program_id(1) // (layout.heads + noise_heads)
        head = tl.program_id(1) % (layout.heads + noise_heads)
        if head < layout.heads:
            _dq_of_rows(
                q1, q1, k1, k1, v, grad, lambda_, lse_ptrs, delta_ptrs, dq_ptrs,
                batch, head, layout.heads, first_row, layout, scale, scale_log2, config, 1,
            )  # fmt: skip
        else:
            _dq_of_rows(
                q2, q2, k2, k2, v, grad2, lambda_, lse_ptrs[1:], delta_ptrs[1:], dq_ptrs[1:],
                batch, head - layout.heads, noise_heads, first_row, layout, scale, scale_log2,
                config, 1,
            )  # fmt: skip
