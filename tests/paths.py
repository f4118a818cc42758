"""Paths of the repository that tests use."""

from tools.paths import RESULTS, ROOT

__all__ = ["CONFIGS", "DOCS", "RESULTS", "ROOT"]

CONFIGS = ROOT / "configs"
DOCS = ROOT / "docs"
