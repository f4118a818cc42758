"""Functions for differential attention with several backends, independent of Megatron.

`api` has the public functions. This file imports nothing, because Python executes it before it
imports `registry`, which must not import torch.
"""
