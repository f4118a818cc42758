"""Run Transformer Engine's Python code on a CPU, with a stand-in for its compiled extension.

To use the stand-in, start a process with the variables that :func:`environment` returns:

- Python imports ``path/sitecustomize.py`` when the process starts. It installs the stand-in.
- ``import transformer_engine`` finds the Python files in the folder that the variable
  ``TRANSFORMER_ENGINE_PYTHON`` names. ``python -m tests.transformer_engine.fetch FOLDER`` writes
  them into a folder.
- Every network that the process builds has Transformer Engine's layers.

The stand-in uses private names of Transformer Engine 2.7 to 2.20. Its FP8 needs
IdentityQuantizer, which 2.20 has and 2.7 does not have.
"""

import os
from pathlib import Path

from tests.paths import ROOT

FOLDER = "TRANSFORMER_ENGINE_PYTHON"
HOOK = Path(__file__).parent / "path"


def python_files() -> str | None:
    """Return the folder that ``TRANSFORMER_ENGINE_PYTHON`` names; None if it is unset or empty."""
    return os.environ.get(FOLDER) or None


def emulates_fp8() -> bool:
    """Return whether the stand-in has products in FP8 for the version of Transformer Engine."""
    folder = Path(python_files() or "", "transformer_engine", "pytorch", "tensor")
    return (folder / "identity_tensor.py").exists()


def environment() -> dict[str, str]:
    """Return the environment variables of a process that uses Transformer Engine's layers.

    Raises:
        KeyError: ``TRANSFORMER_ENGINE_PYTHON`` is not set.
    """
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (HOOK, ROOT, os.environ[FOLDER]))),
        # With this variable, transformer_engine.common loads no CUDA libraries.
        "NVTE_PROJECT_BUILDING": "1",
        # Without this variable, Transformer Engine warns. On a GPU, the training code sets it.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
