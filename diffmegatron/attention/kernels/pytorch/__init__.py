"""Backends in plain PyTorch: `reference` and `blocked` attention, and DIFF V2's subtraction."""
