"""Create a directory atomically: it exists only when it is complete."""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.files import check_utf8, explain_os_errors, format_path


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to ``out`` on success and removed otherwise.

    ``out`` must be new or empty. First, temporary directories of killed processes for the same
    ``out`` are removed. Those of running processes are locked and stay.
    """
    out = out.resolve()
    check_utf8(out)
    with ExitStack() as stack:
        with explain_os_errors(f"cannot create a directory beside {format_path(out)}"):
            if out.exists() and not (out.is_dir() and not any(out.iterdir())):
                raise UserError(
                    f"{format_path(out)} exists already; give a directory that is new or empty"
                )
            out.parent.mkdir(parents=True, exist_ok=True)
            # Without the parent's lock, another process could remove `partial` before it is locked.
            with _locked(out.parent):
                _remove_left(out)
                partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.partial")
                partial.mkdir()
                stack.callback(shutil.rmtree, partial, ignore_errors=True)
                stack.enter_context(_locked(partial))
        yield partial
        with explain_os_errors(f"cannot rename the written directory to {format_path(out)}"):
            partial.rename(out)


def _remove_left(out: Path) -> None:
    name = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.partial")
    for path in out.parent.iterdir():
        if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            with suppress(OSError), _locked(path, wait=False) as locked:
                if locked:
                    shutil.rmtree(path)


@contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[bool]:
    """Lock a directory (flock) within the context; yield whether the lock was acquired."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:
            held = False
        yield held
    finally:
        os.close(descriptor)
