"""Attention over one chunk of the keys, and the exact merging of such partial results.

A softmax over all keys is a weighted mean of the softmaxes over chunks of them, with weights
exp(lse_chunk - lse_all). Context parallelism and long caches compute chunk by chunk and merge;
everything here is differentiable, so gradients through a merge are exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PartialAttention(NamedTuple):
    """Both maps' attention over some of the keys, before lambda joins them.

    Attributes:
        out1, out2: `[b, s, h, 2d]`, softmax(q_i k_i^T) v over these keys; zeros in a row that
            sees none.
        lse1, lse2: `[b, s, h]`, log of the sum of exp(scores) over these keys; -inf in such a row.

    All are fp32 (fp64 for fp64 inputs) whatever the inputs' dtype, so that merging many chunks
    rounds once.
    """

    out1: Tensor
    out2: Tensor
    lse1: Tensor
    lse2: Tensor

    def output(self, lambda_: Tensor) -> Tensor:
        """`out1 - lambda out2`, `[b, s, h, 2d]` in the partial results' dtype."""
        return self.out1 - lambda_.to(self.out2.dtype) * self.out2


def merge_partial(*partials: PartialAttention) -> PartialAttention:
    """The attention over the union of disjoint key chunks, for the same queries.

    Raises:
        ValueError: no partial result was given, or their shapes differ.
    """
    if not partials:
        raise ValueError("merge_partial needs at least one partial result, got none")
    shapes = [list(partial.out1.shape) for partial in partials]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"partials have out1 of shapes {shapes}; they must be of the same queries")
    out1, lse1 = merge_maps([p.out1 for p in partials], [p.lse1 for p in partials])
    out2, lse2 = merge_maps([p.out2 for p in partials], [p.lse2 for p in partials])
    return PartialAttention(out1, out2, lse1, lse2)


def merge_maps(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One map's output `[b, s, h, e]` and log-sum-exp `[b, s, h]` over a union of key chunks."""
    chunk_lse = torch.stack(lses)
    largest = chunk_lse.detach().amax(0)
    # In a row that sees no key all of these are -inf: finite stand-ins keep NaN out of the
    # gradients, where a later torch.where could not remove it.
    empty = largest == -torch.inf
    shifted = (chunk_lse - largest.masked_fill(empty, 0.0)).exp()
    total = shifted.sum(0).masked_fill(empty, 1.0)
    weights = (shifted / total).unsqueeze(-1)
    out = sum((weight * out for weight, out in zip(weights, outs, strict=True)), torch.tensor(0.0))
    return out, (largest + total.log()).masked_fill(empty, -torch.inf)
