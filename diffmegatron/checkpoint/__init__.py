"""Checkpoints of a run. `checkpoint_format.py` defines the files; `sharded.py` stores tensors."""
