"""Create a directory atomically: it exists only when it is complete."""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from diffmegatron.errors import MachineError, UserError
from diffmegatron.files import check_utf8, explain_os_errors, format_path, os_error_text, shorten


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory, which is renamed to ``out`` on success and removed otherwise.

    ``out`` must be new or empty. First, temporary directories of killed processes for the same
    ``out`` are removed. Folders of running processes are locked and stay.
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
        with _named(partial, out):
            yield partial
        with explain_os_errors(f"cannot rename the written directory to {format_path(out)}"):
            partial.rename(out)


@contextmanager
def _named(partial: Path, out: Path) -> Iterator[None]:
    """Replace errors about the temporary directory, and writes to a full disk, by one sentence."""
    try:
        yield
    except OSError as error:
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        if names and not any(name.startswith(str(partial)) for name in names):
            raise
        raise MachineError(f"cannot write {format_path(out)}: {os_error_text(error)}") from error
    except SafetensorError as error:
        # The library has one class of errors; those of reading are reported where it reads.
        raise MachineError(f"cannot write {format_path(out)}: {shorten(str(error))}") from error


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
