"""Saving a run while it trains, and resuming it from a checkpoint."""
