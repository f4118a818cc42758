"""Places in the repository that tests read."""

from tools.paths import RESULTS, ROOT

__all__ = ["CONFIGS", "DOCS", "RESULTS", "ROOT"]

CONFIGS = ROOT / "configs"
DOCS = ROOT / "docs"
