"""Optimizer: DeepSpeed in `zero.py`, learning rates in `schedule.py`, guard in `guard.py`."""
