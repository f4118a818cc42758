"""Checkpoints of a run: `checkpoint_format.py` says what one is, `sharded.py` stores tensors."""
