"""Deprecations that Megatron-core writes to its log, as errors; pyproject.toml has the warnings."""

import logging
import re

DEPRECATED = re.compile(r"deprecat|Rewrapping ModuleSpec", re.IGNORECASE)


class RaiseOnDeprecation(logging.Handler):
    """Raises where a record says that something is deprecated."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        assert not DEPRECATED.search(message), f"{record.name} logs: {message}"


def raise_on_deprecations() -> None:
    """Raise, in this process and those forked from it, where Megatron-core logs a deprecation."""
    logging.getLogger("megatron").addHandler(RaiseOnDeprecation())
