"""Attention by torch's FlexAttention, compiled on CUDA, in one call per map with the whole V."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..call import AttentionCall
from ..masks import AttentionMask, cached_tensors
from ..triton.block_sizes import SIXTEEN_BITS, ChipClass, target_of
from .two_map_calls import Attend, two_calls

# Number of queries, and of keys, in a block of a BlockMask: FlexAttention's default.
_BLOCK = 128
# Maximum number of compilations for different widths, dtypes and groupings of heads. Above this
# limit, a function compiled with `fullgraph=True` raises an error.
MOST_COMPILATIONS = 64


def attend(call: AttentionCall) -> Tensor:
    """Compute attention by one call per map; two maps on CUDA use `kernel_options`."""
    if call.lambda_ is None:
        return _plain_attention(call, None)(*call.maps.arguments())
    options, q = None, call.maps.queries[0]
    if q.is_cuda:
        target = target_of(q.dtype, torch.cuda.get_device_capability(q.device))
        options = kernel_options(call.mask.query_length, q.shape[3], q.dtype, target)
    return two_calls(_plain_attention(call, options), call)


def _plain_attention(call: AttentionCall, options: dict[str, int] | None) -> Attend:
    mask = call.mask

    def attend(q: Tensor, k: Tensor, values: Tensor) -> Tensor:
        start, stop = mask.key_intervals(q.device)
        out: Tensor = _flex_attention(q.device.type)(
            *(x.transpose(1, 2) for x in (q, k, values)),
            block_mask=block_mask(mask, q.device),
            scale=call.scale,
            enable_gqa=q.shape[2] != k.shape[2],
            kernel_options=options,
        )
        return out.transpose(1, 2).masked_fill((start == stop)[:, None, None], 0.0)

    return attend


@cached_tensors
def block_mask(mask: AttentionMask, device: torch.device) -> BlockMask:
    """Return the same BlockMask as torch's `create_block_mask`, but with less memory.

    For s queries and t keys, `create_block_mask` needs several tensors `[s, t]`. Here tensors of
    shape `[s, t / 128]` are enough, because the visible keys of a query are an interval.
    """
    start, stop = mask.key_intervals(device)
    first_key = torch.arange(0, mask.key_length, _BLOCK, device=device)
    end_key = first_key + _BLOCK
    sees = torch.stack(
        [
            (start[:, None] < end_key) & (stop[:, None] > first_key) & (start < stop)[:, None],
            # If the last block of keys is shorter, FlexAttention must treat it as partially masked.
            (start[:, None] <= first_key) & (stop[:, None] >= end_key),
        ]
    )
    padding = (0, 0, 0, -mask.query_length % _BLOCK)
    by_block = torch.nn.functional.pad(sees, padding).unflatten(1, (-1, _BLOCK))
    some, every = by_block[0].any(1), by_block[1].all(1)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= start[query]) & (key < stop[query])

    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible,
        seq_lengths=(mask.query_length, mask.key_length),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the number of true entries, and column indices, true entries first.

    `blocks` is boolean `[query blocks, key blocks]`. The results are int32 `[1, 1, query blocks]`
    and `[1, 1, query blocks, key blocks]`. A row [False, True, True] gives 2 and [1, 2, 0].
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]


def kernel_options(
    query_length: int, head_dim: int, dtype: torch.dtype, target: ChipClass
) -> dict[str, int]:
    """Return FlexAttention's `kernel_options` for a V of width 2d, where d is `head_dim`.

    torch's defaults assume a V as wide as Q. At d = 128, they need more shared memory than a thread
    block can have on these compute capabilities (limit in KiB in parentheses):

    - backward in 16 bits: 242 KiB on 9.0 (227), 290 KiB on 10.x (227);
    - forward in 16 bits: 144 KiB on 8.9 (99);
    - forward in fp32: 176 KiB on 8.0 (163), 128 KiB on 12.0 (99).

    The numbers come from compiling torch's code with triton 3.7.1. No kernel was run.
    """
    backward = _backward_options(head_dim, dtype, target)
    options = {f"bwd_{name}": size for name, size in backward.items()}
    if query_length < _BLOCK:
        # For so few queries FlexAttention uses its decoding kernel, whose default blocks fit.
        return options
    forward = _forward_options(head_dim, dtype, target)
    return options | {f"fwd_{name}": size for name, size in forward.items()}


def _forward_options(head_dim: int, dtype: torch.dtype, target: ChipClass) -> dict[str, int]:
    if dtype not in SIXTEEN_BITS:
        return {"BLOCK_M": 32, "BLOCK_N": 32, "num_stages": 2} if head_dim > 64 else {}
    if target is ChipClass.SMALL and head_dim > 64:
        return {"BLOCK_M": 64, "BLOCK_N": 32, "num_stages": 2, "num_warps": 4}
    return {"num_warps": 8} if head_dim >= 64 else {}


def _backward_options(head_dim: int, dtype: torch.dtype, target: ChipClass) -> dict[str, int]:
    if dtype not in SIXTEEN_BITS or head_dim < 64:
        return {}
    if head_dim == 64:
        return {"num_warps": 8}
    size, stages, warps = (32, 1, 4) if target is ChipClass.SMALL else (64, 2, 8)
    # FlexAttention's backward kernel has separate block sizes for dK and dV (1) and for dQ (2).
    sizes = {f"BLOCK_{side}{part}": size for side in "MN" for part in (1, 2)}
    return sizes | {"num_stages": stages, "num_warps": warps}


@cache
def _flex_attention(device: str) -> Any:
    """Return FlexAttention: compiled for "cuda", uncompiled for other devices.

    The uncompiled form stores all scores. Torch compiles once for the first length, and once for
    all other lengths. New document boundaries cause no compilation.
    """
    if device != "cuda":
        return flex_attention
    compiled = torch.compile(flex_attention, fullgraph=True)
    return torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS)(compiled)
