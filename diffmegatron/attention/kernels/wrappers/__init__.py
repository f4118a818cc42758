"""Backends that call a library's plain attention."""
