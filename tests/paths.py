"""Where the repository keeps what tests read."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
DOCS = ROOT / "docs"
