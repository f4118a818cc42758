"""Location of the recipes and launch scripts that come with this package."""

from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent


def shipped_folder(name: Literal["configs", "launch"]) -> Path:
    """Return the folder of the shipped recipes or launch scripts.

    In an installed wheel the folder lies inside the package. In a git checkout it lies beside the
    package.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
