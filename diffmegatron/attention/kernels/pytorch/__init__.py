"""Backends in plain PyTorch: the paper's equations, and blocks of query rows."""
