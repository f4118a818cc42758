"""Backends that call the plain attention of a library."""
