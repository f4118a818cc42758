"""What measures the package; ``python -m benchmarks --list`` names each measurement."""
