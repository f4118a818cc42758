"""Differential attention behind one function, whatever computes it. Knows torch, no Megatron."""

from .api import diff_attention, softmax_attention
from .select import backend_table

__all__ = ["backend_table", "diff_attention", "softmax_attention"]
