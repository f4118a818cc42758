"""Backends made of a library's plain attention."""
