"""Differential attention behind a few functions, whatever computes it. Knows torch, no Megatron.

`api` holds what others call. Nothing is imported here, so that `registry` loads without torch.
"""
