"""The split of query heads into signal heads and noise heads, in one copy per pass."""

from typing import Any

import torch
from torch import Tensor


def split_queries(query: Tensor, blocks: int, signal: int) -> tuple[Tensor, Tensor]:
    """Return copies of the signal heads and the noise heads of [b, s, heads, d].

    The heads form ``blocks`` equal blocks of ``signal`` signal heads, followed by noise heads. The
    results are copies, because a view of several heads of each block has no single stride.
    """
    split: tuple[Tensor, Tensor] = _SplitQueries.apply(query, blocks, signal)
    return split


class _SplitQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, blocks: int, signal: int) -> tuple[Tensor, ...]:
        ctx.blocks = blocks
        parts = [x.tensor_split([signal], dim=2) for x in query.chunk(blocks, dim=2)]
        ordered = torch.cat([part for kind in zip(*parts, strict=True) for part in kind], dim=2)
        return ordered.tensor_split([blocks * signal], dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        by_block = zip(*(x.chunk(ctx.blocks, dim=2) for x in grads), strict=True)
        return torch.cat([part for block in by_block for part in block], dim=2), None, None
