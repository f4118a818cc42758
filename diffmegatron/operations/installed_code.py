"""The code that a node of a job runs: the libraries' versions, and the commit of this package.

All nodes of a job must run the same code. The functions import none of the libraries.
"""

import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import diffmegatron

_LIBRARIES = ("torch", "megatron-core", "deepspeed", "triton")


def library_versions() -> dict[str, str]:
    """Return the versions of this package and of the installed libraries."""
    found = {"diffmegatron": diffmegatron.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Return this package's git commit, with ``-dirty`` if files were changed; None if unknown."""
    folder = Path(diffmegatron.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    # Without tags, `git describe` prints the hash of the commit.
    options = ("--always", "--dirty", "--abbrev=40", "--exclude=*")
    command = ["git", "-C", str(folder), "describe", *options]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None
