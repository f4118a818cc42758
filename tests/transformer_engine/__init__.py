"""Transformer Engine's own Python on a CPU, behind a stand-in for its compiled extension.

A process uses it when its environment is :func:`environment`: Python then imports
``path/sitecustomize.py`` at its start, which makes ``transformer_engine`` importable from the
folder that ``TRANSFORMER_ENGINE_PYTHON`` names (``python -m tests.transformer_engine.fetch FOLDER``
fills it). The layers of every network that this process builds are Transformer Engine's.

The stand-in follows names that Transformer Engine keeps private, of versions 2.7 to 2.20.
"""

import os
from pathlib import Path

from tests.paths import ROOT

FOLDER = "TRANSFORMER_ENGINE_PYTHON"
HOOK = Path(__file__).parent / "path"


def python_files() -> str | None:
    """Return the folder with Transformer Engine's Python files, or None where none is named."""
    return os.environ.get(FOLDER) or None


def environment() -> dict[str, str]:
    """Return the variables of a process whose layers are Transformer Engine's.

    Raises:
        KeyError: ``TRANSFORMER_ENGINE_PYTHON`` is not set.
    """
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HOOK, ROOT, os.environ[FOLDER]))),
        # With it transformer_engine.common loads no CUDA libraries.
        "NVTE_PROJECT_BUILDING": "1",
        # A rank with a GPU sets it; Transformer Engine warns without it.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
