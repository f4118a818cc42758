"""The recipes and scripts of the repository's ``configs/`` and ``launch/``."""

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder(name: Literal["configs", "launch"]) -> Path:
    """Return the folder of the shipped recipes or scripts.

    A wheel puts it into the package. In a checkout it is beside the package.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
