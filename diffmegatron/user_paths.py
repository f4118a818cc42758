"""The one place that turns what the system says of a path on the command line into a sentence.

Readers and writers name their files themselves wherever they can say more than the system does.
Whatever they let through arrives here, for every command alike.
"""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from diffmegatron.errors import MachineError, UserError
from diffmegatron.files import check_utf8, reason, shown

# What a path can be to blame for; a full disk or a file server is the machine's affair.
_MISTAKES = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP),
    *(errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENXIO, errno.EINVAL),
}
# Of pathlib before Python 3.13, which raises no OSError there.
_LOOP = "Symlink loop from "


@contextmanager
def named_on_the_command_line(words: Sequence[str]) -> Iterator[None]:
    """Refuse in a sentence whatever path among ``words`` the system cannot use.

    An error of a file that the command line does not name passes: that one is a defect, whose
    traceback is of use.

    Args:
        words: of the command line.

    Raises:
        UserError: an ``OSError`` or ``UnicodeError`` was raised for such a path;
            :class:`MachineError` where the same command may succeed later, as on a full disk.
    """
    try:
        yield
    except UnicodeEncodeError as error:
        check_utf8(*map(Path, words))
        raise error
    except RuntimeError as error:
        if not str(error).startswith(_LOOP):
            raise
        raise UserError(
            f"cannot use {str(error).removeprefix(_LOOP)}: {os.strerror(errno.ELOOP)}"
        ) from error
    except OSError as error:
        paths = (error.filename, error.filename2)
        path = next((each for each in paths if _is_named(each, words)), None)
        if path is None:
            raise
        kind = UserError if error.errno in _MISTAKES else MachineError
        raise kind(f"cannot use {shown(Path(path))}: {reason(error)}") from error


def print_any_name() -> None:
    """Let standard output escape the bytes of a name that are no text, as standard error does."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _is_named(path: object, words: Sequence[str]) -> bool:
    """Whether a path is one of the command line, begins with one (PREFIX.bin) or holds one."""
    if not isinstance(path, str | bytes | os.PathLike):
        return False
    whole = Path(os.fsdecode(path)).absolute()
    given = [part for word in words for part in {word, word.partition("=")[2]} if part]
    named = [Path(each).absolute() for each in given]
    return any(str(whole).startswith(str(each)) or whole in each.parents for each in named)
