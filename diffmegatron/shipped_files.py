"""Location of the recipes and launch scripts that come with this package."""

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder(name: Literal["configs", "launch"]) -> Path:
    """Return the folder of the shipped recipes or launch scripts.

    The folder lies inside an installed package, and beside the package in a git checkout.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
