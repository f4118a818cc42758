# mypy: disable-error-code="no-untyped-def"
"""Triton forward kernel of attention with one softmax map, or with two (differential attention).

Each program computes M query rows of one head, or with two maps of one noise head and its r signal
heads. It computes one head after the other, because two accumulators `[M, DV]` would not fit the
registers. The output of the noise head (q2, k2) is computed first and stored in memory, where the
backward pass needs it anyway.

In shapes, DV is the width of a value, rounded up to a power of 2. b is the batch size, s the number
of queries, t the number of keys, h the number of query heads of the first map, and h_kv the number
of kv heads.
"""

import triton
import triton.language as tl

from .tiles import (
    Heads,
    contiguous_heads,
    keys_of_rows,
    load_tile,
    multiply,
    opaque,
    store_rows,
    store_tile,
)


@triton.jit
def _attend(
    accumulator,
    largest,
    total,
    q,
    k_source,
    v_source,
    key_start,
    key_stop,
    row_start,
    row_stop,
    batch,
    kv_head,
    scale_log2,
    config: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Continue the online softmax of M query rows over the keys [key_start, key_stop).

    With scores = q k^T `scale_log2`, each row has these values for the keys so far:

        largest = max(scores)               total = sum(2^(scores - largest))
        accumulator = sum(2^(scores - largest) v)

    `scale_log2` is softmax_scale * log2(e), so that powers of 2 replace powers of e. With MASKED,
    each row sees only its own keys [row_start, row_stop). Otherwise it sees all keys of the loop.
    """
    N: tl.constexpr = config.N
    for first_key in tl.range(key_start, key_stop, N, disable_licm=config.DISABLE_LICM):
        k = load_tile(k_source, batch, kv_head, first_key, config.width, N, config.TMA)
        scores = multiply(q, tl.trans(k)) * scale_log2
        if MASKED:
            keys = first_key + tl.arange(0, N)
            visible = (keys[None, :] >= row_start[:, None]) & (keys[None, :] < row_stop[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = new_largest
        if MASKED:
            # In a row without a visible key so far, -inf - (-inf) would be NaN, so subtract 0.
            reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - reference[:, None])
        rescale = tl.exp2(largest - reference)
        total = total * rescale + tl.sum(weights, 1)
        v = load_tile(v_source, batch, kv_head, first_key, config.value_width, N, config.TMA)
        accumulator = accumulator * rescale[:, None]
        accumulator += multiply(weights.to(v.dtype), v)
        largest = new_largest
    return accumulator, largest, total


@triton.jit
def _one_map(
    q_source, k, v, layout, heads, lse_ptr, batch, head, first_row, scale_log2, config: tl.constexpr
):
    """Return the output of one head for M query rows, `[M, DV]`, and store their log-sum-exps.

    With the scores of `_attend`, the log-sum-exp of a row is log2(sum(2^scores)). A row without
    visible keys has an output of zero and a log-sum-exp of -inf. `lse_ptr` points to
    `[b, heads, s]`, where `heads` is the number of heads of the map.
    """
    M: tl.constexpr = config.M
    ACCUMULATE: tl.constexpr = lse_ptr.dtype.element_ty
    kv_head = head // (heads // layout.kv_heads)
    # Rows past the last query get the visible keys of the last query, so that these rows do not
    # widen the block's range of keys.
    rows = tl.minimum(first_row + tl.arange(0, M), layout.query_length - 1)
    row_start, row_stop = keys_of_rows(rows, layout, config)
    q = load_tile(q_source, batch, head, first_row, config.width, M, config.TMA)
    accumulator = tl.zeros([M, triton.next_power_of_2(config.value_width)], dtype=ACCUMULATE)
    largest = tl.full([M], float("-inf"), dtype=ACCUMULATE)
    total = tl.zeros([M], dtype=ACCUMULATE)
    key_start = tl.min(row_start, 0)
    key_stop = tl.max(row_stop, 0)
    unmasked_stop = key_start
    TABLES: tl.constexpr = config.TABLES
    if not TABLES:
        # Every row sees all keys before `unmasked_stop`, so the blocks of these keys need no mask.
        unmasked_stop = tl.min(row_stop, 0) // config.N * config.N
        accumulator, largest, total = _attend(
            accumulator, largest, total, q, k, v, key_start, unmasked_stop, row_start, row_stop,
            batch, kv_head, scale_log2, config, False,
        )  # fmt: skip
    accumulator, largest, total = _attend(
        accumulator, largest, total, q, k, v, unmasked_stop, key_stop, row_start, row_stop,
        batch, kv_head, scale_log2, config, True,
    )  # fmt: skip
    empty = total == 0.0
    lse = tl.where(empty, float("-inf"), largest + tl.log2(tl.where(empty, 1.0, total)))
    store_rows(lse_ptr, lse, batch, head, first_row, layout.query_length, heads)
    return accumulator / tl.where(empty, 1.0, total)[:, None]


@triton.jit
def forward_kernel(
    q1,
    k1,
    q2,
    k2,
    v,
    lambda_ptr,
    out_ptr,
    out2_ptr,
    lse_ptrs,
    norm_weight_ptr,
    normed_ptr,
    layout,
    q1_strides,
    q2_strides,
    k_strides,
    v_strides,
    scale_log2,
    norm_eps,
    norm_scale,
    config: tl.constexpr,
    NORM: tl.constexpr,
):
    """Compute attention of M query rows of one group: a noise head and its r = RATIO signal heads.

    With MAPS = 1 a group is one head.

    Grid: (blocks of M query rows, b * h / r).

    The inputs are pointers, or with TMA tensor descriptors: `q1` of `[b, s, h, width]`, `q2` of
    `[b, s, h / r, width]`, `k1` and `k2` of `[b, t, h_kv, width]`, and `v` of
    `[b, t, h_kv, value_width]`. `lambda_ptr` points to one number, and `norm_weight_ptr` to the
    weight `[value_width]` of the headwise norm.

    With two maps, the program stores out = out1 - lambda out2 at `out_ptr`, and out2, the output of
    the second map, at `out2_ptr`. With MAPS = 1 it stores out1 at `out_ptr`. With NORM it also
    stores RMSNorm(out) * norm_weight * norm_scale at `normed_ptr`. The norm is over the channels of
    each head. These outputs are contiguous `[b, s, heads of the map, value_width]`. `lse_ptrs`
    point to the base-2 log-sum-exps of each map, contiguous `[b, heads of the map, s]`.
    """
    M: tl.constexpr = config.M
    value_width: tl.constexpr = config.value_width
    ACCUMULATE: tl.constexpr = lse_ptrs[0].dtype.element_ty
    # With a causal mask the last rows see the most keys and need the most time, so start with them.
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    heads, query_length = layout.heads, layout.query_length
    groups = heads // config.RATIO
    batch = tl.program_id(1) // groups
    group = tl.program_id(1) % groups
    q1 = Heads(q1, layout.query_length, q1_strides)
    k1 = Heads(k1, layout.key_length, k_strides)
    v = Heads(v, layout.key_length, v_strides)
    if config.MAPS == 2:
        q2 = Heads(q2, layout.query_length, q2_strides if config.RATIO > 1 else q1_strides)
        k2 = Heads(k2, layout.key_length, k_strides)
        out2 = _one_map(
            q2, k2, v, layout, groups, lse_ptrs[1], batch, group, first_row, scale_log2, config
        )
        store_tile(out2_ptr, out2, batch, group, first_row, query_length, groups, value_width)
    for index in tl.range(0, config.RATIO, disable_licm=True):
        head = group * config.RATIO + index
        if config.MAPS == 2:
            # Without `opaque`, addresses that the second map used would stay in registers during
            # the loops of the first map.
            first_row = opaque(first_row)
        out = _one_map(
            q1, k1, v, layout, heads, lse_ptrs[0], batch, head, first_row, scale_log2, config
        )
        if config.MAPS == 2:
            # Other threads stored parts of the out2 tile that is loaded next, so wait for them.
            tl.debug_barrier()
            stored = contiguous_heads(out2_ptr, query_length, groups, value_width)
            noise = load_tile(stored, batch, group, first_row, value_width, M)
            out -= tl.load(lambda_ptr).to(ACCUMULATE) * noise.to(ACCUMULATE)
        store_tile(out_ptr, out, batch, head, first_row, query_length, heads, value_width)
        if NORM:
            columns = tl.arange(0, out.shape[1])
            weight = tl.load(norm_weight_ptr + columns, mask=columns < value_width, other=0.0)
            # The columns of `out` past `value_width` are zero and add nothing to the sum.
            rstd = 1.0 / tl.sqrt(tl.sum(out * out, 1) / value_width + norm_eps)
            normed = out * rstd[:, None] * (weight.to(ACCUMULATE) * norm_scale)[None, :]
            store_tile(normed_ptr, normed, batch, head, first_row, query_length, heads, value_width)
