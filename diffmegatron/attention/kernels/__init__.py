"""Functions for differential attention with several backends, without Megatron.

`api` has the public functions. Nothing is imported here, so that importing `registry` does not
import torch.
"""
