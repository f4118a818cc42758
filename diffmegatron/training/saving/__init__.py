"""Checkpoints of a run in training: saving, resuming, and starting from another run's weights."""
