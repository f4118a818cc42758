"""Attention over a sequence that is sharded over context-parallel ranks."""
