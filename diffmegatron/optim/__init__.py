"""The optimizer: ZeRO engine (``zero.py``), learning rate (``schedule.py``) and ``guard.py``."""
