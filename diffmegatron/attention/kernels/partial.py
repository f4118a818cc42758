"""Attention over one chunk of the keys, and the exact merging of such partial results.

A softmax over all keys is a weighted mean of the softmaxes over chunks of them, with weights
exp(lse_chunk - lse_all). Context parallelism and long caches compute chunk by chunk and merge;
everything here is differentiable, so gradients through a merge are exact.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Maps(NamedTuple):
    """Softmax maps and the values they share; or the gradients of all of these.

    Attributes:
        queries: `[b, s, h, d]` of one map, or of differential attention's two.
        keys: as many `[b, t, h_kv, d]`.
        v: `[b, t, h_kv, d]` with one map, `[b, t, h_kv, 2d]` with two.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    v: Tensor


def map_factors(lambda_: Tensor | None, like: Tensor) -> list[Tensor]:
    """What each map counts for in the output, 1 and -lambda, in the dtype of ``like``."""
    one = like.new_ones(())
    return [one] if lambda_ is None else [one, -lambda_.detach().to(like.dtype)]


class WholeAttention(NamedTuple):
    """Attention over all keys, from which each chunk of them finds its part of the gradients.

    Attributes:
        out: `[b, s, h, e]`, the one map's output, or `out1 - lambda out2`.
        out2: the second map's output, or None with one map.
        lses: `[b, s, h]` per map, its log-sum-exp over all keys.
    """

    out: Tensor
    out2: Tensor | None
    lses: tuple[Tensor, ...]

    def outs(self, lambda_: Tensor | None) -> tuple[Tensor, ...]:
        """Each map's own output, in `out`'s dtype."""
        if self.out2 is None or lambda_ is None:
            return (self.out,)
        return (self.out + lambda_.to(self.out.dtype) * self.out2, self.out2)

    def halves(self) -> tuple["WholeAttention", "WholeAttention"]:
        """The first half of the rows, and the second."""
        outs, lses = self.out.chunk(2, dim=1), [lse.chunk(2, dim=1) for lse in self.lses]
        outs2 = (None, None) if self.out2 is None else self.out2.chunk(2, dim=1)
        first, second = (
            WholeAttention(outs[half], outs2[half], tuple(lse[half] for lse in lses))
            for half in (0, 1)
        )
        return first, second

    def row_sums(self, grad: Tensor, lambda_: Tensor | None) -> tuple[Tensor, ...]:
        """D_i = rowsum(grad * out_i) `[b, s, h]` of each map, in the log-sum-exps' dtype."""
        wide = grad.to(self.lses[0].dtype)
        sums = (wide * self.out).sum(-1)
        if self.out2 is None or lambda_ is None:
            return (sums,)
        sums2 = (wide * self.out2).sum(-1)
        return (sums + lambda_.to(sums.dtype) * sums2, sums2)


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
    out1, lse1 = merge_maps([p.out1 for p in partials], [p.lse1 for p in partials])
    out2, lse2 = merge_maps([p.out2 for p in partials], [p.lse2 for p in partials])
    return PartialAttention(out1, out2, lse1, lse2)


def merge_maps(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """One map's output `[b, s, h, e]` and log-sum-exp `[b, s, h]` over a union of key chunks.

    Args:
        outs: of each chunk, `[b, s, h, e]`.
        lses: of each chunk, `[b, s, h]`.

    Raises:
        ValueError: none was given, not as many of one as of the other, or their shapes differ.
    """
    out_shapes, lse_shapes = ([list(x.shape) for x in of_chunks] for of_chunks in (outs, lses))
    expected = out_shapes[:1] * len(outs)
    fit = out_shapes == expected and lse_shapes == [shape[:3] for shape in expected]
    if not outs or not fit:
        raise ValueError(
            f"outs have shapes {out_shapes} and lses {lse_shapes}; they must be [b, s, h, e] and "
            "[b, s, h] of the same queries, one of each per chunk"
        )
    chunk_lse = torch.stack(lses)
    largest = chunk_lse.detach().amax(0)
    # In a row that sees no key all of these are -inf: finite stand-ins keep NaN out of the
    # gradients, where a later torch.where could not remove it.
    empty = largest == -torch.inf
    shifted = (chunk_lse - largest.masked_fill(empty, 0.0)).exp()
    total = shifted.sum(0).masked_fill(empty, 1.0)
    weights = (shifted / total).unsqueeze(-1)
    first, *others = (weight * out for weight, out in zip(weights, outs, strict=True))
    return sum(others, first), (largest + total.log()).masked_fill(empty, -torch.inf)
