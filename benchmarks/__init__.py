"""Benchmarks of the package; ``python -m benchmarks --list`` lists them."""
