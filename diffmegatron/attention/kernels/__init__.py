"""Differential attention behind one function, whatever computes it. Knows torch, no Megatron."""

from .api import diff_attention, softmax_attention
from .norm import HeadwiseNorm
from .partial import PartialAttention, merge_partial
from .select import backend_table

__all__ = [
    "HeadwiseNorm",
    "PartialAttention",
    "backend_table",
    "diff_attention",
    "merge_partial",
    "softmax_attention",
]
