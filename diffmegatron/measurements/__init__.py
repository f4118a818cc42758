"""Measurements of a machine by ``diffmegatron tune``: their format, and the user's cache."""
