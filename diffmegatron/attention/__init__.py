"""Differential attention: functions, their kernels, and kinds of attention.

The functions work without Megatron; the layers for Megatron-core are in ``model/layers``::

    from diffmegatron.attention import diff_attention, diff_attention_v2, softmax_attention
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffmegatron.attention.kernels.api import (
        HeadwiseNorm,
        diff_attention,
        diff_attention_v2,
        softmax_attention,
    )

__all__ = ["HeadwiseNorm", "diff_attention", "diff_attention_v2", "softmax_attention"]


def __getattr__(name: str) -> Any:
    # Import the kernels on first use, because they import torch, which is slow.
    if name not in __all__:
        raise AttributeError(f"module 'diffmegatron.attention' has no attribute {name!r}")
    from diffmegatron.attention.kernels import api

    return getattr(api, name)
