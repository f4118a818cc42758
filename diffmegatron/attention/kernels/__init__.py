"""Functions for differential attention with several backends, independent of Megatron.

This file imports nothing, so that importing `registry` does not import torch.
"""
