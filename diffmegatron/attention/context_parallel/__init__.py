"""Attention over a sequence that context-parallel ranks share."""
