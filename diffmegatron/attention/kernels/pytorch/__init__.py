"""Backends in plain PyTorch: the equations read literally, and in blocks of query rows."""
