"""Turn operating-system errors about paths on the command line into one sentence."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diffmegatron.errors import MachineError, UserError
from diffmegatron.files import check_utf8, format_path, os_error_text

# Errors that a wrong path causes. All others, such as a full disk, are failures of the machine.
_USER_ERRNOS = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO, errno.EINVAL),
}
# Errors of a machine that lacks a resource, whichever file they name. Writes name no file.
_LACKS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space on the disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.ENOMEM: "use a machine with more memory",
}
# Texts of the RuntimeErrors that Python and torch raise if they cannot allocate memory or start a
# thread.
_TOO_LITTLE = (
    *("can't allocate memory", "Cannot allocate memory", os.strerror(errno.EAGAIN)),
    *("can't start new thread", "unable to start watchdog thread"),
)
# Before Python 3.13, pathlib raises a RuntimeError with this text for a loop of symbolic links.
_LOOP = "Symlink loop from "


@contextmanager
def explain_path_errors(words: Sequence[str]) -> Iterator[None]:
    """Replace an error about a path on the command line by an error of one sentence.

    ``words`` are the words of the command line. An error about any other file is a defect of the
    program, and passes unchanged.

    Raises:
        UserError: a path is wrong, for instance missing, not readable or not UTF-8.
        MachineError: reading or writing failed for another reason, such as a full disk, or the
            process reached its limit of memory or open files.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        check_utf8(*map(Path, words))
        raise error
    except RuntimeError as error:
        if any(text in str(error) for text in _TOO_LITTLE):
            raise MachineError(
                f"not enough memory or threads; {_LACKS[errno.ENOMEM]}, or raise the limit of "
                "processes (ulimit -u)"
            ) from error
        if not str(error).startswith(_LOOP):
            raise
        raise UserError(
            f"cannot use {str(error).removeprefix(_LOOP)}: {os.strerror(errno.ELOOP)}"
        ) from error
    except MemoryError as error:
        raise MachineError(f"not enough memory; {_LACKS[errno.ENOMEM]}") from error
    except OSError as error:
        paths = (error.filename, error.filename2)
        path = next((each for each in paths if _is_named(each, words)), None)
        if path is None and error.errno in _LACKS:
            raise MachineError(f"{os_error_text(error)}; {_LACKS[error.errno]}") from error
        if path is None:
            raise
        kind = UserError if error.errno in _USER_ERRNOS else MachineError
        raise kind(f"cannot use {format_path(Path(path))}: {os_error_text(error)}") from error


def _is_named(path: object, words: Sequence[str]) -> bool:
    """Return whether ``path`` belongs to a path on the command line.

    ``path`` may begin with a path of the command line (``PREFIX.bin`` for ``PREFIX``), or be a
    parent folder of one. A word ``KEY=VALUE`` also counts as the path ``VALUE``.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    whole = Path(os.fsdecode(path)).absolute()
    given = [part for word in words for part in {word, word.partition("=")[2]} if part]
    named = [Path(each).absolute() for each in given]
    return any(str(whole).startswith(str(each)) or whole in each.parents for each in named)
