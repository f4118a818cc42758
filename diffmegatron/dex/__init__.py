"""Scoring of a pretrained model's attention heads, and selection of the heads that DEX extends.

DEX (Kong, Jang, Kwak, 2025) subtracts a trained projection from the output of selected heads.
"""
