"""Measurements of a run: metrics, progress, seconds per phase, held-out losses and suites."""
