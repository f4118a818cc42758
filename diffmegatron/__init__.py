"""Train Differential Transformers at scale."""

__version__ = "0.1.0"
