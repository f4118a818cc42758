"""The headwise RMSNorm after differential attention, an option of `diff_attention`."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm


class HeadwiseNorm(NamedTuple):
    """`scale * weight * RMSNorm(head)` over the 2d channels of each head (arXiv 2410.05258, 3.1).

    Attributes:
        weight: `[2d]`, the same for all heads, or None for no weight.
        eps: number that is added to the mean square.
        scale: factor of the normalised head, (1 - lambda_init) in the paper.
    """

    weight: Tensor | None
    eps: float
    scale: float

    def check(self, v: Tensor) -> None:
        """Raise ValueError unless eps >= 0 and the weight is `[2d]` on the device of v."""
        if not self.eps >= 0.0:
            raise ValueError(f"norm.eps is {self.eps}; it must be 0 or more")
        if self.weight is None:
            return
        if self.weight.shape != v.shape[-1:] or self.weight.device != v.device:
            raise ValueError(
                f"norm.weight has shape {list(self.weight.shape)} on {self.weight.device}; with "
                f"v {list(v.shape)} it must be [{v.shape[-1]}] on {v.device}"
            )

    def apply_to(self, heads: Tensor) -> Tensor:
        """Normalise heads `[b, s, h, 2d]` in fp32 or wider, and return them in their own dtype."""
        x = heads.to(torch.promote_types(heads.dtype, torch.float32))
        if self.weight is None:
            weight = torch.full(x.shape[-1:], self.scale, dtype=x.dtype, device=x.device)
        else:
            weight = self.weight.to(x.dtype) * self.scale
        return rms_norm(x, x.shape[-1:], weight, self.eps).to(heads.dtype)
