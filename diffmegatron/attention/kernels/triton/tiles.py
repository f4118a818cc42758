# mypy: disable-error-code="no-untyped-def"
# Parameters of kernels are values of the compiler and have no Python types.
"""Functions that the Triton kernels share: tiles, products, and visible intervals.

Tensors are `[batch, length, heads, width]`; the last stride is 1, others are any. A *source* is a
pointer, or with TMA a host-side tensor descriptor over `[batch, heads, length, width]` of block
`[1, 1, ROWS, WIDTH]`. The kernels read both through `load_tile`. The dimensions of size one come
first, because only then the compiler folds the reshape into the load and keeps the tile in shared
memory. A tile `[1, ROWS, 1, WIDTH]` would pass through registers, which then spill. WIDTH is a
power of 2, and columns past `width` are read as zero.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(
    source,
    batch,
    head,
    first_row,
    length,
    stride_batch,
    stride_row,
    stride_head,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):
    """Load rows `[ROWS, WIDTH]` of one head from `first_row` on; zeros past the end."""
    if TMA:
        tile = source.load([batch, head, first_row, 0]).reshape([ROWS, WIDTH])
    else:
        rows = first_row + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        base = (
            source + tl.cast(batch, tl.int64) * stride_batch + tl.cast(head, tl.int64) * stride_head
        )
        pointers = base + rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
        inside = (rows < length)[:, None] & (columns < width)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(
    pointer,
    tile,
    batch,
    head,
    first_row,
    length,
    heads,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write `[ROWS, WIDTH]` to a contiguous `[batch, length, heads, width]` tensor."""
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    row_index = (tl.cast(batch, tl.int64) * length + rows.to(tl.int64)) * heads + head
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    pointers = pointer + row_index[:, None] * width + columns[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(pointer, batch, head, first_row, length, heads, other, ROWS: tl.constexpr):
    """Load `[ROWS]` of a contiguous `[batch, heads, length]` tensor; `other` past the end."""
    rows = first_row + tl.arange(0, ROWS)
    base = pointer + (tl.cast(batch, tl.int64) * heads + head) * length
    return tl.load(base + rows, mask=rows < length, other=other)


@triton.jit
def store_rows(pointer, values, batch, head, first_row, length, heads, ROWS: tl.constexpr):
    """Write `[ROWS]` to a contiguous `[batch, heads, length]` tensor."""
    rows = first_row + tl.arange(0, ROWS)
    base = pointer + (tl.cast(batch, tl.int64) * heads + head) * length
    tl.store(base + rows, values, mask=rows < length)


@triton.jit
def multiply(a, b, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Multiply with the accumulator's dtype.

    fp32 is multiplied as tf32, because ieee and tf32x3 would spill kilobytes of registers.
    """
    if INTERPRETED:
        # The interpreter's dot of bf16 operands is wrong (triton 3.6 to 3.9).
        product = tl.dot(a.to(ACCUMULATE), b.to(ACCUMULATE), out_dtype=ACCUMULATE)
    else:
        product = tl.dot(a, b, out_dtype=ACCUMULATE, input_precision="tf32")
    return product


@triton.jit
def opaque(x, INTERPRETED: tl.constexpr):
    """Return the integer x so that the compiler recomputes all values that depend on it.

    Otherwise the compiler computes the addresses of two accesses to the same rows once, and keeps
    them in registers across the loops in between. The forward at d = 128 has no registers for them.
    """
    if INTERPRETED:
        copy = x
    else:
        copy = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return copy


@triton.jit
def keys_of_rows(
    rows,
    query_length,
    key_length,
    shift,
    start_ptr,
    stop_ptr,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Return the key interval [start, stop) that each query row sees.

    `shift` is the first query's position minus the first key's. With DOCUMENTS the intervals,
    which include causality, are read from `[query_length]` tables.
    """
    if DOCUMENTS:
        start = tl.load(start_ptr + rows, mask=rows < query_length, other=0)
        stop = tl.load(stop_ptr + rows, mask=rows < query_length, other=0)
    else:
        start = tl.zeros_like(rows)
        stop = start + key_length
        if CAUSAL:
            stop = tl.minimum(stop, tl.maximum(rows + shift + 1, 0))
    return start, stop


@triton.jit
def queries_of_keys(
    keys,
    query_length,
    key_length,
    shift,
    start_ptr,
    stop_ptr,
    CAUSAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Return the query interval [start, stop) that sees each key, as `keys_of_rows` inverted."""
    if DOCUMENTS:
        start = tl.load(start_ptr + keys, mask=keys < key_length, other=0)
        stop = tl.load(stop_ptr + keys, mask=keys < key_length, other=0)
    else:
        start = tl.zeros_like(keys)
        if CAUSAL:
            start = tl.maximum(keys - shift, 0)
        stop = tl.where(keys < key_length, query_length, 0)
    return start, stop
