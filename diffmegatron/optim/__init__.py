"""The optimizer: DeepSpeed in `zero.py`, learning rates in `schedule.py`, skips in `guard.py`."""
