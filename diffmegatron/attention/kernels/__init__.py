"""Differential attention behind a few functions, with several backends; without Megatron.

`api` has the public functions. Nothing is imported here, so that `registry` loads without torch.
"""
