"""Scores of a pretrained model's attention heads, and the selection of heads that DEX extends."""
