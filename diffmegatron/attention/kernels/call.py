"""A checked call of attention, the argument of every backend."""

from dataclasses import dataclass, replace
from typing import TypedDict

from torch import Tensor

from .checks import autocast_dtype, check_lambda, check_maps, resolve_scale
from .headwise_norm import HeadwiseNorm
from .maps import QKV
from .masks import AttentionMask, build_mask
from .registry import Op


class CallOptions(TypedDict, total=False):
    """The options that all attention functions share, as `api.diff_attention` describes them."""

    causal: bool
    softmax_scale: float | None
    cu_seqlens: Tensor | None
    query_offset: int | None
    key_offset: int


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A checked call of attention with one map (softmax) or two maps (differential).

    Attributes:
        maps: queries, keys and values, of one dtype and on one device.
        scale: factor of the scores, above 0.
        mask: the visible pairs.
        lambda_: 0-dim factor of the second map; None with one map, and where the two maps of a
            chunk are computed without their combination.
        norm: headwise norm of the result, for backends that apply it; None for no norm.
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
    ) -> "AttentionCall":
        """Return the call of these tensors and options, which `api.diff_attention` describes.

        Raises:
            ValueError: shapes, dtypes, devices, head counts or options do not fit.
        """
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
        )
        scale = resolve_scale(softmax_scale, maps.queries[0].shape[3])
        return cls(maps, scale, mask, lambda_, norm)

    @property
    def op(self) -> Op:
        """Operation for the number of maps."""
        return "softmax" if len(self.maps.queries) == 1 else "differential"

    def autocast(self) -> "AttentionCall":
        """Return the call with queries, keys and values in autocast's dtype, if autocast is on."""
        dtype = autocast_dtype(self.maps.v)
        return replace(self, maps=QKV.of(*(x.to(dtype) for x in self.maps.arguments())))
