"""Iteration over blocks of query rows, the map of one block, and the layouts.

Queries are computed as `[b * h_kv, repeats, s, d]` (repeats = h / h_kv query heads of one kv head)
and keys as `[b * h_kv, t, d]`, contiguous, in fp32 (fp64 for fp64 inputs).
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from ..masks import AttentionMask

# Rows of a map in one block, and elements of all maps of a block. In fp32 these are 512 KiB, which
# fit into a core's L2 cache together with the second map. 32 or 128 rows, and four times as many
# elements, were up to a third slower at 256 to 2K keys, and equally fast at 4K.
ROWS_PER_BLOCK = 64
ELEMENTS_PER_CORE = 2**17


def row_blocks(q: Tensor, mask: AttentionMask) -> Iterator[tuple[slice, slice, slice]]:
    """Yield (heads, query rows, visible keys) of each block with visible keys.

    On a CPU a block has one kv head per thread, so that each core's share stays in its cache. With
    few keys it has more heads, because the calls of a small block take longer than its computation.
    On other devices a block has all heads, for few launches.
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

    `[heads, repeats, rows, d], [heads, keys, d] -> [heads, repeats * rows, keys]`.
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


def sees_nothing(mask: AttentionMask, rows: slice, keys: slice, like: Tensor) -> Tensor | None:
    """Return boolean `[repeats * rows, 1]`, True for rows without visible keys, or None.

    `like` is the block's queries `[heads, repeats, rows, d]`.
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
    empty = sees_nothing(mask, rows, keys, q)
    return weights if empty is None else weights.masked_fill_(empty, 0.0)


def group_queries(x: Tensor, kv_heads: int) -> Tensor:
    """Rearrange `[b, s, h, e] -> [b * h_kv, repeats, s, e]`."""
    grouped = x.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return grouped.to(_compute_dtype(x.dtype)).contiguous()


def ungroup_queries(x: Tensor, batch: int) -> Tensor:
    """Invert `group_queries`, except for the dtype."""
    return x.unflatten(0, (batch, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def group_keys(x: Tensor) -> Tensor:
    """Rearrange `[b, t, h_kv, e] -> [b * h_kv, t, e]`."""
    return x.transpose(1, 2).flatten(0, 1).to(_compute_dtype(x.dtype)).contiguous()


def ungroup_keys(x: Tensor, batch: int) -> Tensor:
    """Invert `group_keys`, except for the dtype."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()


def by_noise_head(x: Tensor, noise_heads: int, repeats: int = 1) -> Tensor:
    """View `[heads, noise heads * repeats * rows, keys]` in five dimensions."""
    return x.unflatten(1, (noise_heads, repeats, -1))


def sum_over_signal_heads(x: Tensor, noise_heads: int, repeats: int) -> Tensor:
    """Sum `[heads, noise heads * repeats * rows, keys] -> [heads, noise heads * rows, keys]`."""
    return x if repeats == 1 else by_noise_head(x, noise_heads, repeats).sum(2).flatten(1, 2)


# The heads and maps of a block use the same table, and so do all layers. A tensor that was created
# under inference_mode could not be used in training later.
@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _hidden(
    mask: AttentionMask, rows: tuple[int, int], keys: tuple[int, int], device: torch.device
) -> Tensor | None:
    return mask.hidden(rows, keys, device)


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
