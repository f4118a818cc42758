"""Queries, keys and values of one or two softmax maps, and the merging of results over chunks.

A *map* is softmax(Q K^T). Differential attention has two maps. The heads of the first map are
signal heads, and the heads of the second map are noise heads. r consecutive signal heads share a
noise head: signal head n has noise head n // r. Without sharing, r = 1.

In the shapes b is the batch size, s the number of queries, t the number of keys, h the number of
signal heads, h_kv the number of kv heads, d the width of a query, and e the width of a value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class QKV(NamedTuple):
    """Queries, keys and common values of one or two softmax maps, or their gradients.

    For each map the queries are `[b, s, heads of the map, d]` and the keys `[b, t, h_kv, d]`. The
    values are `[b, t, h_kv, d]` with one map, and `[b, t, h_kv, 2d]` with two.
    """

    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]
    v: Tensor

    @classmethod
    def of(cls, *heads: Tensor) -> "QKV":
        """Return the QKV of the tensors `q, k, v` or `q1, k1, q2, k2, v`."""
        *queries_and_keys, v = heads
        return cls(tuple(queries_and_keys[::2]), tuple(queries_and_keys[1::2]), v)

    def arguments(self) -> tuple[Tensor, ...]:
        """Return the tensors in the order in which `of` receives them."""
        pairs = zip(self.queries, self.keys, strict=True)
        return (*(x for pair in pairs for x in pair), self.v)


def combine_maps(outs: Sequence[Tensor], lambda_: Tensor | None) -> Tensor:
    """Return `out1 - lambda out2`, or the output of the only map: `[b, s, h, e]`.

    `lambda_` is a 0-dim tensor, or None with one map. The result has the dtype of the outputs.
    """
    if lambda_ is None:
        (out,) = outs
        return out
    signal, noise = outs
    shared = (lambda_.to(noise.dtype) * noise).unsqueeze(3)
    return (by_noise_head(signal, noise.shape[2]) - shared).flatten(2, 3)


def map_factors(lambda_: Tensor | None, like: Tensor) -> list[Tensor]:
    """Return the factors of the maps in `combine_maps`, detached: [1] or [1, -lambda]."""
    one = like.new_ones(())
    return [one] if lambda_ is None else [one, -lambda_.detach().to(like.dtype)]


def map_gradients(grad: Tensor, lambda_: Tensor | None, noise_heads: int) -> list[Tensor]:
    """Return the gradient of each map's output, given the gradient of `combine_maps`' result.

    `grad` is `[b, s, h, e]`. The gradient of the second output is `[b, s, noise_heads, e]`, in fp32
    (fp64 for fp64 `grad`).
    """
    if lambda_ is None:
        return [grad]
    wide = torch.promote_types(grad.dtype, torch.float32)
    shared = by_noise_head(grad, noise_heads).sum(3, dtype=wide)
    return [grad, -lambda_.detach() * shared]


def by_noise_head(x: Tensor, noise_heads: int) -> Tensor:
    """View `[b, s, h, ...]` as `[b, s, h / r, r, ...]`, where h / r is `noise_heads`."""
    return x.unflatten(2, (noise_heads, -1))


class WholeAttention(NamedTuple):
    """Results of attention over all keys, saved for the backward pass.

    `out` `[b, s, h, e]` is the result of `combine_maps`. `out2` `[b, s, h / r, e]` is the output of
    the second map, or None with one map. `lses` has the log-sum-exps of each map, `[b, s, heads of
    the map]`.
    """

    out: Tensor
    out2: Tensor | None
    lses: tuple[Tensor, ...]

    def outs(self, lambda_: Tensor | None) -> tuple[Tensor, ...]:
        """Return the output of each map: `(out,)`, or with two maps `(out + lambda out2, out2)`."""
        if self.out2 is None or lambda_ is None:
            return (self.out,)
        return (combine_maps((self.out, self.out2), -lambda_), self.out2)

    def halves(self) -> tuple["WholeAttention", "WholeAttention"]:
        """Split into the results of the first and of the second half of the query rows."""
        outs, lses = self.out.chunk(2, dim=1), [lse.chunk(2, dim=1) for lse in self.lses]
        outs2 = (None, None) if self.out2 is None else self.out2.chunk(2, dim=1)
        first, second = (
            WholeAttention(outs[half], outs2[half], tuple(lse[half] for lse in lses))
            for half in (0, 1)
        )
        return first, second

    def deltas(self, grad: Tensor, lambda_: Tensor | None) -> tuple[Tensor, ...]:
        """Return the deltas of each map, `[b, s, heads of the map]`, in the dtype of `lses`.

        The delta is rowsum(grad * output of the map), where `grad` is the gradient of `out`. For a
        noise head it is the sum over its signal heads. The gradient of lambda is minus the sum of
        the second map's deltas.
        """
        wide = grad.to(self.lses[0].dtype)
        sums = (wide * self.out).sum(-1)
        if self.out2 is None or lambda_ is None:
            return (sums,)
        shared = (by_noise_head(wide, self.out2.shape[2]) * self.out2.unsqueeze(3)).sum(-1)
        return (sums + lambda_.to(sums.dtype) * shared.flatten(2), shared.sum(3))


def merge_maps(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge the outputs and log-sum-exps of one map over chunks of keys.

    `outs` has one output `[b, s, heads of the map, e]` per chunk, and `lses` one log-sum-exp
    `[b, s, heads of the map]`. The merged log-sum-exp is lse = log(sum(exp(lse_chunk))). The merged
    output is sum(exp(lse_chunk - lse) out_chunk).
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
