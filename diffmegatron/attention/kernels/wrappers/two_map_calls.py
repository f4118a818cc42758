"""Differential attention from calls of any plain attention (arXiv 2410.05258, appendix A).

FlashDiffAttn_1 makes two calls with V whole (6d forward, 14d backward, in multiply-adds per pair);
FlashDiffAttn_2 makes four, for kernels that want V as narrow as Q (8d and 20d).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..call import AttentionCall
from ..maps import combine_maps

# From q, k, v of one map `[b, length, heads, width]` to `[b, s, h, width]`.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def two_calls(attend: Attend, call: AttentionCall) -> Tensor:
    """Return `attend(q1, k1, v) - lambda attend(q2, k2, v)`, subtracted in fp32 at least.

    lambda in bf16 would be off by up to 5e-3. A noise head is computed once, and subtracted from
    every signal head that shares it.
    """
    (q1, q2), (k1, k2), v = call.maps
    dtype = torch.promote_types(v.dtype, torch.float32)
    outs = (attend(q1, k1, v).to(dtype), attend(q2, k2, v).to(dtype))
    return combine_maps(outs, call.lambda_).to(v.dtype)


def four_calls(attend: Attend, call: AttentionCall) -> Tensor:
    """Compute what `two_calls` does, with V in two halves of Q's width.

    Both maps attend to the same copy of each half, which the backward pass keeps. Views would keep
    more: V is one itself, of all heads of the projection.
    """
    halves = [half.contiguous() for half in call.maps.v.chunk(2, -1)]

    def attend_by_halves(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
        return torch.cat([attend(q, k, half) for half in halves], -1)

    return two_calls(attend_by_halves, call)
