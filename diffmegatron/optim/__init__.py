"""The optimizer: DeepSpeed ZeRO (``zero.py``), learning rate (``schedule.py``), and the guard.

The guard (``guard.py``) decides whether a training step updates the weights.
"""
