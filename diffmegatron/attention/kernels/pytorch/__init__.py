"""Backends in plain PyTorch: the literal equations, and blocks of query rows."""
