"""Differential attention behind one function, whatever computes it. Knows torch, no Megatron."""

from .api import attention_with_lse, diff_attention, softmax_attention
from .norm import HeadwiseNorm
from .partial import PartialAttention, merge_maps, merge_partial
from .select import backend_table

__all__ = [
    "HeadwiseNorm",
    "PartialAttention",
    "attention_with_lse",
    "backend_table",
    "diff_attention",
    "merge_maps",
    "merge_partial",
    "softmax_attention",
]
