"""Files that may be damaged, read within limits; files that must not be, written whole.

Everything a run reads may have been cut short, overwritten or replaced by something else. Small
files (JSON, YAML) are read by this module alone, so that what a size, a kind of file or a depth of
nesting may be is decided here, once.
"""

import errno
import io
import os
import stat
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Self

from diffmegatron.errors import UserError

# Far above what any file of ours reaches: a manifest of 10,000 ranks has 1.5 MB.
MAX_BYTES = 1 << 28
_PIECE = 1 << 20
_SHOWN = 200


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of an ordinary file.

    Args:
        path: links are followed.
        max_bytes: a larger file is refused unread.

    Raises:
        UserError: it is missing, is no ordinary file (a FIFO would be waited for forever), is
            larger than ``max_bytes``, or cannot be read.
    """
    with open_file(path) as stream:
        # In pieces: read() allocates all that it may read before it reads any of it.
        pieces, left = [], max_bytes + 1
        try:
            while piece := stream.read(min(left, _PIECE)):
                pieces.append(piece)
                left -= len(piece)
        except OSError as error:
            raise UserError(f"cannot read {shown(path)}: {reason(error)}") from None
    content = b"".join(pieces)
    if len(content) > max_bytes:
        raise UserError(f"{shown(path)} is larger than the {max_bytes} bytes that it may have")
    return content


def open_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """An ordinary file of any size, opened to be read.

    Args:
        path: links are followed.
        buffering: bytes, as of :func:`open`.

    Raises:
        UserError: it is missing, is no ordinary file (a FIFO would be waited for forever), or
            cannot be opened.
    """
    try:
        # Without O_NONBLOCK the opening of a FIFO waits for somebody to write into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {shown(path)}: {reason(error)}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(f"{shown(path)} is {_kind(mode)}, not a file")
    return os.fdopen(descriptor, "rb", buffering=buffering)


def file_size(path: Path) -> int:
    """Bytes of an ordinary file.

    Raises:
        UserError: as :func:`open_file`.
    """
    with open_file(path, buffering=0) as stream:
        return os.fstat(stream.fileno()).st_size


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The UTF-8 text of an ordinary file.

    Raises:
        UserError: as :func:`read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{shown(path)} is not UTF-8 text: byte {error.start} is not") from None


def read_json(path: Path, schema: Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """The content of a JSON file as a pydantic model, dataclass or typed collection.

    Args:
        path: of the file.
        schema: what pydantic checks it against, such as a model or ``dict[str, int]``.
        max_bytes: a larger file is refused unread.

    Raises:
        UserError: as :func:`read_bytes`, or it is not JSON of that schema; ``cannot be used``
            stands in the sentence, and where in the file it is wrong.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), schema, shown(path))


def parse_json(content: bytes | str, schema: Any, name: str) -> Any:
    """JSON as a pydantic model, dataclass or typed collection.

    pydantic's parser is one that deep nesting and long integers do not hurt: Python's own ends
    in a ``RecursionError`` there.

    Raises:
        UserError: it is not; ``name`` stands for it in the sentence.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(schema).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        at = f" at {clipped(place.lstrip('.'))}" if place else ""
        raise UserError(f"{name} is damaged and cannot be used: {clipped(first['msg'])}{at}") from (
            None
        )


def create_file(path: Path) -> BinaryIO:
    """An ordinary file, emptied or made, opened to be written.

    Raises:
        OSError: it cannot be; a FIFO that nobody reads is such a case, and is not waited for.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_durably(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a neighbour is written, synced and renamed over it.

    Raises:
        OSError: it cannot be written; then what was there before is still there.
    """
    check_replaceable(path)
    temporary = path.with_name(f"{path.name}.tmp")
    opened = create_file(temporary)
    try:
        with opened as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        # On a full disk what was written of it is space that others want.
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


class HeldFolder:
    """A context that keeps a folder open, to tell it from another one that takes its place.

    A number of a removed folder that nobody holds open may be given to the next folder.

    Args:
        path: of the folder; links are followed.

    Raises:
        OSError: on entering; the folder cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the folder; true where the disk cannot tell."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except OSError as error:
            # ESTALE: a file server has removed one of them.
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def write_picture(path: Path, figure: Any, dpi: int = 130) -> None:
    """Write a figure of matplotlib as a PNG, whole or not at all.

    Raises:
        OSError: as :func:`write_durably`.
    """
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    write_durably(path, content.getvalue())


def check_replaceable(*paths: Path) -> None:
    """Refuse to write over anything but an ordinary file: a rename would replace a FIFO or device.

    Raises:
        OSError: one of them is there and is something else, or cannot be looked at.
    """
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise OSError(errno.EEXIST, f"{_kind(mode)} of that name is there", str(path))


def sync_folder(folder: Path) -> None:
    """Make renames within a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shown(path: Path) -> str:
    """A path for a sentence: never longer than a few lines, without bytes that are no text."""
    return clipped(str(path).encode(errors="backslashreplace").decode())


def check_utf8(*paths: Path) -> None:
    """Refuse a name that is not UTF-8, which safetensors and JSON cannot hold.

    Raises:
        UserError: one of the paths has such a name in it.
    """
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UserError(f"{shown(path)} is not a name in UTF-8; give one that is") from None


def printable(path: str | Path) -> str:
    r"""A file's name as UTF-8 text, which any JSON and any output takes; one text for one name.

    Names are bytes to the system. Those that are UTF-8 stand as they are, every other byte is
    written ``\xff``, and a backslash of the name is doubled so that none is mistaken for one of
    those; undoing the two gives the name back.
    """
    return os.fsencode(path).replace(b"\\", b"\\\\").decode(errors="backslashreplace")


def shortest_ends(paths: Sequence[PurePath]) -> list[str]:
    """Names of paths: of each the shortest end that no other has, or all of it."""
    every = Counter(end for path in paths for end in _ends(path))
    return [
        str(PurePath(*next((end for end in _ends(path) if every[end] == 1), path.parts)))
        for path in paths
    ]


def _ends(path: PurePath) -> list[tuple[str, ...]]:
    """The parts from each one on, the shortest first."""
    return [path.parts[-length:] for length in range(1, len(path.parts) + 1)]


def clipped(text: str) -> str:
    """Text for a sentence: on one line, the middle of what is too long left out."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return line if len(line) <= _SHOWN else f"{line[:120]}...{line[-60:]}"


def reason(error: OSError | ValueError) -> str:
    """Why the system refused, in its own words without numbers and paths."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "something else")
