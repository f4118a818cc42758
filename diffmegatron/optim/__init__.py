"""ZeRO engine (``zero.py``), learning rate (``schedule.py``) and check of steps (``guard.py``)."""
