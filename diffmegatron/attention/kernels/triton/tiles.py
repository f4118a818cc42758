# mypy: disable-error-code="no-untyped-def"
"""Functions that the Triton kernels share: loads, stores, products, intervals of visible keys.

Tensors are `[batch, length, heads, width]` with a last stride of 1. A *tile* is `[ROWS, WIDTH]`:
ROWS consecutive rows (positions) of one head. WIDTH is `width` rounded up to a power of 2.

A *source* is a pointer, or with TMA a tensor descriptor of the view `[batch, heads, length, width]`
in blocks of `[1, 1, ROWS, WIDTH]`. For this order of dimensions the compiler folds the reshape to
`[ROWS, WIDTH]` into the load, and the tile stays in shared memory. A block of `[1, ROWS, 1, WIDTH]`
would pass through registers, which would spill.
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
    """Load ROWS rows of one head, from `first_row` on, as a tile `[ROWS, WIDTH]`.

    Rows from `length` on and columns past `width` are zero.
    """
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
    """Store a tile in a contiguous `[batch, length, heads, width]` tensor.

    Rows from `length` on and columns past `width` are not stored.
    """
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    row_index = (tl.cast(batch, tl.int64) * length + rows.to(tl.int64)) * heads + head
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    pointers = pointer + row_index[:, None] * width + columns[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(pointer, batch, head, first_row, length, heads, other, ROWS: tl.constexpr):
    """Load one number per row, `[ROWS]`, from a contiguous `[batch, heads, length]` tensor.

    Rows from `length` on get the value `other`.
    """
    rows = first_row + tl.arange(0, ROWS)
    base = pointer + (tl.cast(batch, tl.int64) * heads + head) * length
    return tl.load(base + rows, mask=rows < length, other=other)


@triton.jit
def store_rows(pointer, values, batch, head, first_row, length, heads, ROWS: tl.constexpr):
    """Store one number per row, `[ROWS]`, in a contiguous `[batch, heads, length]` tensor."""
    rows = first_row + tl.arange(0, ROWS)
    base = pointer + (tl.cast(batch, tl.int64) * heads + head) * length
    tl.store(base + rows, values, mask=rows < length)


@triton.jit
def multiply(a, b, ACCUMULATE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the matrix product of a and b in the dtype ACCUMULATE.

    On a GPU, fp32 operands are multiplied as tf32, because Triton's more exact input precisions
    would spill kilobytes of registers.
    """
    if INTERPRETED:
        # In Triton 3.6 to 3.9 the interpreter computes tl.dot of bf16 operands wrongly.
        product = tl.dot(a.to(ACCUMULATE), b.to(ACCUMULATE), out_dtype=ACCUMULATE)
    else:
        product = tl.dot(a, b, out_dtype=ACCUMULATE, input_precision="tf32")
    return product


@triton.jit
def opaque(x, INTERPRETED: tl.constexpr):
    """Return the integer x; the compiler cannot see that the result equals x.

    Code that uses the result computes its addresses again. With x, the compiler would keep earlier
    addresses in registers across the loops in between. At d = 128 the forward kernel has no free
    registers for them.
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
    """Return the interval of visible keys, [start, stop), of each query row.

    With DOCUMENTS the intervals come from two tables `[query_length]`
    (`AttentionMask.key_intervals`), which respect causality. `shift` is the position of the first
    query minus the position of the first key.
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
    """Return the interval of query rows, [start, stop), that see each key.

    An interval with start >= stop is empty. With DOCUMENTS the intervals come from two tables
    `[key_length]` (`AttentionMask.query_intervals`). `shift` is as in `keys_of_rows`.
    """
    if DOCUMENTS:
        start = tl.load(start_ptr + keys, mask=keys < key_length, other=0)
        stop = tl.load(stop_ptr + keys, mask=keys < key_length, other=0)
    else:
        start = tl.zeros_like(keys)
        if CAUSAL:
            start = tl.maximum(keys - shift, 0)
        stop = tl.where(keys < key_length, query_length, 0)
    return start, stop
