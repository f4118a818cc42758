"""Attention in Megatron-core's layers; `self_attention.py` is where a layer's begins."""
