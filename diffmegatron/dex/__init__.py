"""Scores of a pretrained model's attention heads, and selection of the heads that DEX extends.

``diffmegatron.attention.variants.dex`` describes DEX (differential extension).
"""
