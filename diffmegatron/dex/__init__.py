"""Scores of a pretrained model's attention heads, and selection of the heads that DEX extends.

DEX (Kong, Jang and Kwak, 2025) multiplies the output of each selected head by a trained matrix, and
subtracts a multiple of this product from the output.
"""
