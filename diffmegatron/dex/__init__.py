"""Scores of a pretrained model's attention heads, and selection of the heads that DEX extends.

``diffmegatron.attention.kinds.dex`` describes DEX (differential extension).
"""
