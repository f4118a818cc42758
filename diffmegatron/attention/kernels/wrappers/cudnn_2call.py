"""Two calls of cuDNN's attention with V whole, as FlashDiffAttn_1."""

from torch import Tensor

from ..masks import AttentionMask
from .cudnn_graphs import plain_attention
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
    return two_calls(plain_attention(softmax_scale, mask), q1, k1, q2, k2, v, lambda_)
