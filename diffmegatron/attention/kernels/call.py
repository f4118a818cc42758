"""The checked arguments of an attention call, which every attention backend receives.

In the shapes b is the batch size, s the number of queries, h the number of heads, and d the width
of a query. With two maps a value has the width 2d.
"""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from .checks import check_lambda, check_maps
from .maps import QKV
from .masks import AttentionMask, build_mask
from .registry import Op


class CallOptions(TypedDict, total=False):
    """Options that all attention functions share; `api.diff_attention` describes them."""

    causal: bool
    softmax_scale: float | None
    cu_seqlens: Tensor | None
    query_offset: int | None
    key_offset: int
    window: int | None


class HeadwiseNorm(NamedTuple):
    """`scale * weight * RMSNorm(head)` per head of 2d channels (arXiv 2410.05258, section 2.1).

    Attributes:
        weight: `[2d]`, the same for all heads, or None for no weight.
        eps: number that is added to the mean square.
        scale: factor of the normalised head, (1 - lambda_init) in the paper.
    """

    weight: Tensor | None
    eps: float
    scale: float

    def check(self, v: Tensor) -> None:
        """Raise ValueError unless eps >= 0 and `weight` is either None or `[2d]` on v's device."""
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


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """Checked arguments of attention with one softmax map, or with two (differential attention).

    `scale` is the factor of the scores. `lambda_` is the 0-dim factor of the second map. It is None
    with one map, and in `chunks.chunk_attention`, which returns the output of each map separately.
    Backends with `registry.Backend.fuses_norm` apply `norm`. For others, `api.diff_attention` does.
    """

    maps: QKV
    scale: float
    mask: AttentionMask
    lambda_: Tensor | None = None
    norm: HeadwiseNorm | None = None

    @classmethod
    def checked(
        cls,
        maps: QKV,
        lambda_: Tensor | None = None,
        norm: HeadwiseNorm | None = None,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
        cu_seqlens: Tensor | None = None,
        query_offset: int | None = None,
        key_offset: int = 0,
        window: int | None = None,
    ) -> "AttentionCall":
        """Return the call, or raise ValueError if an argument is wrong (`api.diff_attention`)."""
        check_maps(maps)
        if lambda_ is not None:
            check_lambda(lambda_, like=maps.queries[0])
        if norm is not None:
            norm.check(maps.v)
        mask = build_mask(
            maps.queries[0].shape[1],
            maps.v.shape[1],
            causal=causal,
            cu_seqlens=cu_seqlens,
            query_offset=query_offset,
            key_offset=key_offset,
            window=window,
        )
        # Refuse a scale of 0: torch multiplies masked scores of -inf by it, which gives NaN.
        scale: float = maps.queries[0].shape[3] ** -0.5 if softmax_scale is None else softmax_scale
        if not isinstance(scale, Real) or not 0.0 < scale < math.inf:
            raise ValueError(f"softmax_scale is {scale!r}; it must be a finite number above 0")
        return cls(maps, float(scale), mask, lambda_, norm)

    @property
    def op(self) -> Op:
        """The operation, a key of `registry.BACKENDS`."""
        return "softmax" if len(self.maps.queries) == 1 else "differential"

    def autocast(self) -> "AttentionCall":
        """Return the call with queries, keys and values in autocast's dtype.

        Without autocast, or with float64 values, return the call unchanged.
        """
        v = self.maps.v
        if v.dtype == torch.float64 or not torch.is_autocast_enabled(v.device.type):
            return self
        dtype = torch.get_autocast_dtype(v.device.type)
        return replace(self, maps=QKV.of(*(x.to(dtype) for x in self.maps.arguments())))
