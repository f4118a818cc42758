"""Paths in the repository that tools and tests read and write."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Folder of measured numbers, which the README and docs quote.
RESULTS = ROOT / "docs" / "results"
