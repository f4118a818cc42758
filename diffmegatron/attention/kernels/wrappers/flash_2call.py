"""Two calls of flex_head_fa with V whole: FlashDiffAttn_1, the form the paper timed."""

from torch import Tensor

from ..masks import AttentionMask
from .flash import load_library, plain_attention
from .two_map_calls import two_calls


def diff_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    softmax_scale: float,
    mask: AttentionMask,
) -> Tensor:
    """Shapes as in `api.diff_attention`."""
    attend = plain_attention(load_library("flex_head_fa"), softmax_scale, mask)
    return two_calls(attend, q1, k1, q2, k2, v, lambda_)
