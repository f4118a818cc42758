"""Errors for the deprecations that Megatron-core writes to its log.

Deprecations that Python reports as warnings become errors by the settings in pyproject.toml.
"""

import logging
import re

DEPRECATED = re.compile(r"deprecat|Rewrapping ModuleSpec", re.IGNORECASE)


class RaiseOnDeprecation(logging.Handler):
    """Log handler that raises an AssertionError for a message about a deprecation."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        assert not DEPRECATED.search(message), f"{record.name} logs: {message}"


def raise_on_deprecations() -> None:
    """Make this process and its forks raise AssertionError if Megatron-core logs a deprecation."""
    logging.getLogger("megatron").addHandler(RaiseOnDeprecation())
