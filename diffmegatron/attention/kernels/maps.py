"""Softmax maps over a chunk of the keys, their combination, and the exact merging of chunks.

A softmax over all keys is a weighted mean of the softmaxes over chunks of them, with weights
exp(lse_chunk - lse_all). Context parallelism computes chunk by chunk and merges.

Differential attention has two maps. The second map may have only h / r heads. Then r consecutive
signal heads share a noise head: signal head n has noise head n // r.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class QKV(NamedTuple):
    """Queries and keys of one or two softmax maps and their shared values, or gradients of these.

    Attributes:
        queries: `[b, s, h, d]` for each of one or two maps; the second map has h / r heads.
        keys: `[b, t, h_kv, d]` for each map.
        v: `[b, t, h_kv, d]` with one map, `[b, t, h_kv, 2d]` with two.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    v: Tensor

    @classmethod
    def of(cls, *heads: Tensor) -> "QKV":
        """Return the maps of ``q, k, v`` or ``q1, k1, q2, k2, v``."""
        *queries_and_keys, v = heads
        return cls(tuple(queries_and_keys[::2]), tuple(queries_and_keys[1::2]), v)

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order of the attention functions, the inverse of :meth:`of`."""
        pairs = zip(self.queries, self.keys, strict=True)
        return (*(x for pair in pairs for x in pair), self.v)


def combine_maps(outs: Sequence[Tensor], lambda_: Tensor | None) -> Tensor:
    """Return `out1 - lambda out2` from each map's own output, or the one map's output.

    Args:
        outs: `[b, s, h, e]` and `[b, s, h / r, e]`, or the first only; their dtype is also the
            dtype of the computation.
        lambda_: 0-dim; None with one map.

    Returns:
        `[b, s, h, e]`.
    """
    if lambda_ is None:
        (out,) = outs
        return out
    signal, noise = outs
    shared = (lambda_.to(noise.dtype) * noise).unsqueeze(3)
    return (by_noise_head(signal, noise.shape[2]) - shared).flatten(2, 3)


def map_factors(lambda_: Tensor | None, like: Tensor) -> list[Tensor]:
    """Return each map's factor in the output, 1 and -lambda, in the dtype of ``like``."""
    one = like.new_ones(())
    return [one] if lambda_ is None else [one, -lambda_.detach().to(like.dtype)]


def map_gradients(grad: Tensor, lambda_: Tensor | None, noise_heads: int) -> list[Tensor]:
    """Return the gradients of each map's output from the gradient of `combine_maps`'s result.

    The second map's gradient is fp32 or wider.
    """
    if lambda_ is None:
        return [grad]
    wide = torch.promote_types(grad.dtype, torch.float32)
    shared = by_noise_head(grad, noise_heads).sum(3, dtype=wide)
    return [grad, -lambda_.detach() * shared]


def by_noise_head(x: Tensor, noise_heads: int) -> Tensor:
    """View `[b, s, h, ...]` as `[b, s, h / r, r, ...]`."""
    return x.unflatten(2, (noise_heads, -1))


class WholeAttention(NamedTuple):
    """Results of attention over all keys, which each chunk needs for its part of the gradients.

    Attributes:
        out: output of one map, or `out1 - lambda out2`, `[b, s, h, e]`.
        out2: output of the second map `[b, s, h / r, e]`, or None with one map.
        lses: log-sum-exp of each map over all keys, `[b, s, its heads]`.
    """

    out: Tensor
    out2: Tensor | None
    lses: tuple[Tensor, ...]

    def outs(self, lambda_: Tensor | None) -> tuple[Tensor, ...]:
        """Return each map's own output, in `out`'s dtype."""
        if self.out2 is None or lambda_ is None:
            return (self.out,)
        return (combine_maps((self.out, self.out2), -lambda_), self.out2)

    def halves(self) -> tuple["WholeAttention", "WholeAttention"]:
        """Split into the first and the second half of the rows."""
        outs, lses = self.out.chunk(2, dim=1), [lse.chunk(2, dim=1) for lse in self.lses]
        outs2 = (None, None) if self.out2 is None else self.out2.chunk(2, dim=1)
        first, second = (
            WholeAttention(outs[half], outs2[half], tuple(lse[half] for lse in lses))
            for half in (0, 1)
        )
        return first, second

    def deltas(self, grad: Tensor, lambda_: Tensor | None) -> tuple[Tensor, ...]:
        """Return D of each map `[b, s, its heads]`, in the log-sum-exps' dtype.

        D1 is rowsum(grad * out1), and D2 the sum of rowsum(grad * out2) over the signal heads that
        share a noise head. The gradient of lambda is minus the sum of D2.
        """
        wide = grad.to(self.lses[0].dtype)
        sums = (wide * self.out).sum(-1)
        if self.out2 is None or lambda_ is None:
            return (sums,)
        shared = (by_noise_head(wide, self.out2.shape[2]) * self.out2.unsqueeze(3)).sum(-1)
        return (sums + lambda_.to(sums.dtype) * shared.flatten(2), shared.sum(3))


def merge_maps(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a map's output `[b, s, h, e]` and log-sum-exp `[b, s, h]` over several key chunks.

    Args:
        outs: outputs of the chunks, `[b, s, h, e]` each.
        lses: log-sum-exps of the chunks, `[b, s, h]` each.

    Raises:
        ValueError: ``outs`` is empty, or differs from ``lses`` in number or shape.
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
    largest = chunk_lse.amax(0)
    # In a row without visible keys all log-sum-exps are -inf, and their difference would be NaN.
    empty = largest == -torch.inf
    shifted = (chunk_lse - largest.masked_fill(empty, 0.0)).exp()
    total = shifted.sum(0).masked_fill(empty, 1.0)
    weights = (shifted / total).unsqueeze(-1)
    first, *others = (weight * out for weight, out in zip(weights, outs, strict=True))
    return sum(others, first), (largest + total.log()).masked_fill(empty, -torch.inf)
