"""Differential attention behind one function, whatever computes it. Knows torch, no Megatron."""

from .api import attention_with_lse, diff_attention, softmax_attention
from .chunks import chunk_attention, chunk_gradients
from .norm import HeadwiseNorm
from .partial import Maps, PartialAttention, WholeAttention, merge_maps, merge_partial
from .select import backend_table

__all__ = [
    "HeadwiseNorm",
    "Maps",
    "PartialAttention",
    "WholeAttention",
    "attention_with_lse",
    "backend_table",
    "chunk_attention",
    "chunk_gradients",
    "diff_attention",
    "merge_maps",
    "merge_partial",
    "softmax_attention",
]
