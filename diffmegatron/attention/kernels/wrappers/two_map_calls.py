"""Differential attention from calls of any plain attention (arXiv 2410.05258, appendix A).

Q has the width d, and V the width 2d. The paper's FlashDiffAttn_1 makes two calls with the whole V.
FlashDiffAttn_2 makes four calls with halves of V, for kernels that need a V as wide as Q. For both
maps together, two calls need 6d multiply-adds forward and 14d backward per head and (query, key)
pair. Four calls need 8d forward and 20d backward.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..call import AttentionCall
from ..maps import combine_maps

# A function from q, k and v of one map, `[batch, length, heads, width]` each, to the map's output.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def two_calls(attend: Attend, call: AttentionCall) -> Tensor:
    """Return `attend(q1, k1, v) - lambda attend(q2, k2, v)`, subtracted in fp32 or wider.

    In bf16, a lambda between 0.5 and 1 would be rounded by up to 2e-3.
    """
    (q1, q2), (k1, k2), v = call.maps
    dtype = torch.promote_types(v.dtype, torch.float32)
    outs = (attend(q1, k1, v).to(dtype), attend(q2, k2, v).to(dtype))
    return combine_maps(outs, call.lambda_).to(v.dtype)


def four_calls(attend: Attend, call: AttentionCall) -> Tensor:
    """Return the same result as `two_calls`, with V in two halves that are as wide as Q.

    The halves are copied, because in a model V is a view of the output of the fused QKV projection.
    Saved views would keep all query, key and value heads in memory.
    """
    halves = [half.contiguous() for half in call.maps.v.chunk(2, -1)]

    def attend_by_halves(q: Tensor, k: Tensor, _: Tensor) -> Tensor:
        return torch.cat([attend(q, k, half) for half in halves], -1)

    return two_calls(attend_by_halves, call)
