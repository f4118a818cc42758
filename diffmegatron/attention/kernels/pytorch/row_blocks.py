"""Blocks of query rows for the `blocked` backend: iteration, softmax maps and tensor layouts.

The functions here handle one map per call. In the shapes b is the batch size, s the number of
queries, t the number of keys, h the number of query heads of the map, h_kv the number of kv heads,
d the width of a query, and e any width.

Queries have the layout `[b * h_kv, repeats, s, d]` with repeats = h / h_kv, and keys have the
layout `[b * h_kv, t, d]`. All are contiguous, in fp32 (fp64 for fp64 inputs). In one block heads is
the number of its pairs of batch row and kv head, rows the number of its query rows, and keys the
number of its keys.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..cached_tensors import cached_tensors
from ..masks import AttentionMask

# Query rows in a block, times query heads per kv head; a block has at least 16 query rows. With 32
# or 128, the backend was up to a third slower at 256 to 2K keys, and equally fast at 4K.
ROWS_PER_BLOCK = 64
# Maximum number of elements of one map per CPU core and block, unless one head alone has more.
# 2**17 elements in fp32 are 512 KiB, so that both maps fit into a core's L2 cache. With four times
# this number, the backend was up to a third slower at 256 to 2K keys, and equally fast at 4K.
ELEMENTS_PER_CORE = 2**17


def row_blocks(q: Tensor, mask: AttentionMask) -> Iterator[tuple[slice, slice, slice]]:
    """Yield slices (heads, query rows, visible keys) for each block with visible keys.

    The slice of heads indexes the first dimension of `q` `[b * h_kv, repeats, s, d]`. On a CPU a
    block has one head per thread, so that a thread's scores stay in the cache of its core. If the
    rows see few keys, it has several heads per thread, because the overhead of torch's calls would
    exceed the computation. Elsewhere a block has all heads, for few kernel launches.
    """
    groups, repeats, length = q.shape[:3]
    rows_per_block = max(ROWS_PER_BLOCK // repeats, 16)
    for start in range(0, length, rows_per_block):
        stop = min(start + rows_per_block, length)
        key_start, key_stop = mask.key_range(start, stop)
        if key_start == key_stop:
            continue
        heads_per_block = groups
        if q.device.type == "cpu":
            map_size = repeats * (stop - start) * (key_stop - key_start)
            heads_per_block = torch.get_num_threads() * max(ELEMENTS_PER_CORE // map_size, 1)
        for head in range(0, groups, heads_per_block):
            yield (
                slice(head, min(head + heads_per_block, groups)),
                slice(start, stop),
                slice(key_start, key_stop),
            )


def block_scores(q: Tensor, k: Tensor, mask: AttentionMask, rows: slice, keys: slice) -> Tensor:
    """Return q k^T with -inf for hidden pairs; a row without visible keys is all -inf.

    Shapes: `[heads, repeats, rows, d], [heads, keys, d] -> [heads, repeats * rows, keys]`.
    """
    scores = q.flatten(1, 2) @ k.mT
    prefix = mask.unmasked_prefix(rows.start, rows.stop)
    if prefix == scores.shape[-1]:
        return scores
    hidden = _hidden(mask, (rows.start, rows.stop), (keys.start + prefix, keys.stop), q.device)
    assert hidden is not None
    by_row = scores.unflatten(1, (q.shape[1], q.shape[2]))
    by_row[..., prefix:].masked_fill_(hidden, -torch.inf)
    return scores


def rows_without_keys(mask: AttentionMask, rows: slice, keys: slice, like: Tensor) -> Tensor | None:
    """Return a mask `[repeats * rows, 1]`, True for rows without visible keys, or None.

    `like` is the block's queries, of which only the shape and the device are used.
    """
    if mask.unmasked_prefix(rows.start, rows.stop) > 0:
        return None
    hidden = _hidden(mask, (rows.start, rows.stop), (keys.start, keys.stop), like.device)
    if hidden is None or not bool((empty := hidden.all(-1, keepdim=True)).any()):
        return None
    return empty.repeat(like.shape[1], 1)


def attention_map(q: Tensor, k: Tensor, mask: AttentionMask, rows: slice, keys: slice) -> Tensor:
    """Return softmax(q k^T) of one block, with zeros in rows without visible keys."""
    weights = block_scores(q, k, mask, rows, keys).softmax(-1)
    empty = rows_without_keys(mask, rows, keys, q)
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


def group_queries(x: Tensor, kv_heads: int) -> Tensor:
    """Rearrange `[b, s, h, e] -> [b * h_kv, repeats, s, e]`, in fp32 (fp64 for fp64)."""
    grouped = x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return grouped.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


def ungroup_queries(x: Tensor, batch: int) -> Tensor:
    """Rearrange `[b * h_kv, repeats, s, e] -> [b, s, h, e]`."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def group_keys(x: Tensor) -> Tensor:
    """Rearrange `[b, t, h_kv, e] -> [b * h_kv, t, e]`, in fp32 (fp64 for fp64)."""
    return (
        x.transpose(1, 2).flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    )


def ungroup_keys(x: Tensor, batch: int) -> Tensor:
    """Rearrange `[b * h_kv, t, e] -> [b, t, h_kv, e]`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


def block_by_noise_head(x: Tensor, noise_heads: int, repeats: int = 1) -> Tensor:
    """Split dimension 1 of `[heads, noise_heads * repeats * rows, keys]` into its three factors.

    Here `repeats` is the number of signal heads per noise head.
    """
    return x.unflatten(1, (noise_heads, repeats, -1))


def sum_over_signal_heads(x: Tensor, noise_heads: int, repeats: int) -> Tensor:
    """Sum over the `repeats` signal heads that share a noise head.

    Shapes: `[heads, noise_heads * repeats * rows, keys] -> [heads, noise_heads * rows, keys]`.
    """
    return x if repeats == 1 else block_by_noise_head(x, noise_heads, repeats).sum(2).flatten(1, 2)


# The mask of a block is cached, because all heads, maps and layers use the same one.
@cached_tensors
def _hidden(
    mask: AttentionMask, rows: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Tensor | None:
    return mask.hidden(rows, keys, device)
