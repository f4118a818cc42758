# mypy: disable-error-code="no-untyped-def"
"""Functions that the Triton kernels share: loads, stores, products, intervals of visible pairs.

A *tile* is `[rows, WIDTH]`: consecutive rows (positions) of one head. `width` is the number of
channels of a head, and WIDTH is `width` rounded up to a power of 2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# True if Triton's interpreter runs the kernels. `triton.jit` also reads this setting at import.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Heads(NamedTuple):
    """A `[batch, length, heads, width]` tensor in memory, with a last stride of 1.

    `strides` are the other three strides, in elements. `source` is a pointer, or with TMA a tensor
    descriptor of the view `[batch, heads, length, width]` in blocks of `[1, 1, rows, WIDTH]`. For
    this order of dimensions the compiler folds the reshape to `[rows, WIDTH]` into the load, and
    the tile stays in shared memory.
    """

    source: Any
    length: Any
    strides: Any


class Layout(NamedTuple):
    """Numbers of heads, lengths and positions of an attention call.

    `start_ptr` and `stop_ptr` point to int32 tables, or are None without packed documents and
    without a window. The tables have the interval of keys that each query sees. For the kernel of
    dK and dV, they have the interval of queries that see each key. `shift` is the position of the
    first query minus the position of the first key.
    """

    start_ptr: Any
    stop_ptr: Any
    heads: Any
    kv_heads: Any
    query_length: Any
    key_length: Any
    shift: Any


class Config(NamedTuple):
    """Compile-time options of the kernels, for blocks of M query rows and N keys.

    `width` is the width of a query, and `value_width` of a value. `MAPS` is the number of softmax
    maps, 1 or 2. `RATIO` is the number of heads of the first map (signal heads) that share a head
    of the second map (noise head), or 1 with one map. With `TABLES`, the mask has packed documents
    or a window, and its intervals are in the tables of `Layout`. With `TMA` (Tensor Memory
    Accelerator), q, k, v and dO are loaded through tensor descriptors. `DISABLE_LICM` turns off
    loop-invariant code motion.
    """

    width: int
    value_width: int
    M: int
    N: int
    MAPS: int
    RATIO: int
    CAUSAL: bool
    TABLES: bool
    TMA: bool
    DISABLE_LICM: bool


@triton.constexpr_function
def accumulator_dtype(dtype):
    """Return the dtype in which sums of a tensor's elements are accumulated: fp64 or fp32."""
    return tl.float64 if dtype == tl.float64 else tl.float32


@triton.jit
def load_tile(
    tensor,
    batch,
    head,
    first_row,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    TMA: tl.constexpr = False,
):
    """Load ROWS rows of one head of a `Heads` as a tile `[ROWS, WIDTH]`.

    Rows past the tensor's length and columns past `width` are zero.
    """
    WIDTH: tl.constexpr = triton.next_power_of_2(width)
    if TMA:
        tile = tensor.source.load([batch, head, first_row, 0]).reshape([ROWS, WIDTH])
    else:
        rows = first_row + tl.arange(0, ROWS)
        columns = tl.arange(0, WIDTH)
        batch_offset = tl.cast(batch, tl.int64) * tensor.strides[0]
        base = tensor.source + batch_offset + tl.cast(head, tl.int64) * tensor.strides[2]
        pointers = base + rows.to(tl.int64)[:, None] * tensor.strides[1] + columns[None, :]
        inside = (rows < tensor.length)[:, None] & (columns < width)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def contiguous_heads(pointer, length, heads, width: tl.constexpr):
    """Return the `Heads` of a contiguous `[batch, length, heads, width]` tensor."""
    stride_row = heads * width
    return Heads(pointer, length, (tl.cast(length, tl.int64) * stride_row, stride_row, width))


@triton.jit
def store_tile(pointer, tile, batch, head, first_row, length, heads, width: tl.constexpr):
    """Store a tile in a contiguous `[batch, length, heads, width]` tensor.

    Rows past `length` and columns past `width` are not stored.
    """
    rows = first_row + tl.arange(0, tile.shape[0])
    columns = tl.arange(0, tile.shape[1])
    row_index = (tl.cast(batch, tl.int64) * length + rows.to(tl.int64)) * heads + head
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    pointers = pointer + row_index[:, None] * width + columns[None, :]
    tl.store(pointers, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_rows(pointer, batch, head, first_row, length, heads, other, ROWS: tl.constexpr):
    """Load a number for each of ROWS rows from a contiguous `[batch, heads, length]` tensor.

    Rows past `length` get the number `other`.
    """
    rows = first_row + tl.arange(0, ROWS)
    base = pointer + (tl.cast(batch, tl.int64) * heads + head) * length
    return tl.load(base + rows, mask=rows < length, other=other)


@triton.jit
def store_rows(pointer, values, batch, head, first_row, length, heads):
    """Store one number per row in a contiguous `[batch, heads, length]` tensor.

    Rows past `length` are not stored.
    """
    rows = first_row + tl.arange(0, values.shape[0])
    base = pointer + (tl.cast(batch, tl.int64) * heads + head) * length
    tl.store(base + rows, values, mask=rows < length)


@triton.jit
def multiply(a, b):
    """Return the matrix product of a and b, accumulated in fp32 (fp64 for fp64 operands).

    On a GPU, fp32 operands are multiplied as tf32, because more exact products would spill
    kilobytes of registers.
    """
    ACCUMULATE: tl.constexpr = accumulator_dtype(a.dtype)
    if INTERPRETED:
        # In Triton 3.6 to 3.9 the interpreter computes tl.dot of bf16 operands wrongly.
        product = tl.dot(a.to(ACCUMULATE), b.to(ACCUMULATE), out_dtype=ACCUMULATE)
    else:
        product = tl.dot(a, b, out_dtype=ACCUMULATE, input_precision="tf32")
    return product


@triton.jit
def opaque(x):
    """Return the int32 x, but hide from the compiler that the result equals x.

    Code that uses the result computes its addresses again, instead of keeping earlier addresses in
    registers across loops. The compiler also cannot evaluate a comparison with the result.
    """
    if INTERPRETED:
        copy = x
    else:
        copy = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return copy


@triton.jit
def keys_of_rows(rows, layout, config: tl.constexpr):
    """Return the start and the stop of the interval of keys that each query row sees."""
    if config.TABLES:
        start = tl.load(layout.start_ptr + rows, mask=rows < layout.query_length, other=0)
        stop = tl.load(layout.stop_ptr + rows, mask=rows < layout.query_length, other=0)
    else:
        start = tl.zeros_like(rows)
        stop = start + layout.key_length
        if config.CAUSAL:
            stop = tl.minimum(stop, tl.maximum(rows + layout.shift + 1, 0))
    return start, stop


@triton.jit
def queries_of_keys(keys, layout, config: tl.constexpr):
    """Return the start and the stop of the interval of query rows that see each key.

    The interval is empty if start >= stop.
    """
    if config.TABLES:
        start = tl.load(layout.start_ptr + keys, mask=keys < layout.key_length, other=0)
        stop = tl.load(layout.stop_ptr + keys, mask=keys < layout.key_length, other=0)
    else:
        start = tl.zeros_like(keys)
        if config.CAUSAL:
            start = tl.maximum(keys - layout.shift, 0)
        stop = tl.where(keys < layout.key_length, layout.query_length, 0)
    return start, stop
