"""Measurements of a training run: metrics, speed, time per phase, held-out losses, evaluations."""
