"""Benchmarks of the package; ``python -m tools.benchmarks --list`` lists them."""
