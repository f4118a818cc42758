"""One run at a time in a ``run_dir``: two would write each other's checkpoints."""

from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import shown

LOCK = "lock"
# A lock ends with its process, also with one that was killed. Across machines a file server may
# hold that of a dead machine longer: NFS 4 for a lease of 90 seconds.
_PATIENCE_SECONDS = 120.0


def run_lock(run_dir: Path, patience: float = _PATIENCE_SECONDS) -> FileLock:
    """The context of the one run in ``run_dir``; rank 0 takes it.

    Raises:
        UserError: on entering; ``run_dir`` cannot be made or written, or another run stays in it.
    """
    return FileLock(run_dir / LOCK, f"run_dir {run_dir}", "give another run_dir", patience)


def refuse_a_file(run_dir: Path) -> None:
    """Check that ``run_dir`` is not a file.

    Raises:
        UserError: it is.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(
            f"run_dir {shown(run_dir)} is a file; give a directory, or a path that is free"
        )
