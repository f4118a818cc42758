"""Read files that may be damaged, and write files atomically."""

import errno
import hashlib
import io
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Self

from diffmegatron.errors import UserError

# Default size limit of files that are read whole, such as a checkpoint's manifest (1.5 MB for
# 10,000 ranks) or a tokenizer.json (tens of MB).
MAX_BYTES = 1 << 28
_PIECE = 1 << 20
_SHOWN = 200


def read_bytes(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``."""
    with open_file(path) as stream:
        # read(n) allocates n bytes before it reads the first byte, so read in pieces.
        pieces, left = [], max_bytes + 1
        with explain_os_errors(f"cannot read {format_path(path)}"):
            while piece := stream.read(min(left, _PIECE)):
                pieces.append(piece)
                left -= len(piece)
    content = b"".join(pieces)
    if len(content) > max_bytes:
        raise UserError(f"{format_path(path)} is larger than the limit of {max_bytes} bytes")
    return content


def open_file(path: Path, *, buffering: int = -1) -> BinaryIO:
    """Open a regular file of any size for reading."""
    try:
        # Without O_NONBLOCK, opening a FIFO blocks until another process writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {format_path(path)}: {os_error_text(error)}") from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise UserError(f"{format_path(path)} is {_kind(mode)}, not a file")
    return os.fdopen(descriptor, "rb", buffering=buffering)


def file_size(path: Path) -> int:
    """Return the number of bytes of a regular file."""
    with open_file(path, buffering=0) as stream:
        return os.fstat(stream.fileno()).st_size


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular file in UTF-8."""
    try:
        return read_bytes(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{format_path(path)} is not UTF-8 text: byte {error.start} is invalid"
        ) from None


def read_json(path: Path, schema: Any, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the content of a JSON file as a pydantic model, dataclass or typed collection.

    ``schema`` is the type of the result.
    """
    return parse_json(read_bytes(path, max_bytes=max_bytes), schema, format_path(path))


def parse_json(content: bytes | str, schema: Any, name: str) -> Any:
    """Parse JSON as ``schema``, a pydantic model, dataclass or typed collection.

    Pydantic's parser refuses deep nesting; Python's own would raise a ``RecursionError``.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(schema).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"])
        at = f" at {shorten(place.lstrip('.'))}" if place else ""
        raise UserError(f"{name} is damaged and cannot be used: {shorten(first['msg'])}{at}") from (
            None
        )


@contextmanager
def explain_os_errors(failure: str) -> Iterator[None]:
    """Turn an OSError into a UserError that begins with ``failure``, e.g. "cannot read FILE"."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{failure}: {os_error_text(error)}") from None


def create_file(path: Path) -> BinaryIO:
    """Create or truncate a file for writing; raise OSError for a FIFO that no process reads."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags, 0o666), "wb")


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a file atomically: write and sync a temporary file, then rename it to ``path``.

    Raises:
        OSError: ``path`` is not a regular file or cannot be written; it is unchanged. If only the
            sync of the parent folder fails, ``path`` already has the new content.
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
    except OSError as error:
        # Free the space of the temporary file, because the disk may be full.
        with suppress(OSError):
            temporary.unlink()
        # Only errors of paths have a file name, and a write to a full disk has none.
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_path(path.parent)


def write_sealed(path: Path, content: str) -> None:
    """Write one line of JSON and, below it, its sha256, for state that users never edit.

    The sha256 detects damage that leaves valid JSON, such as a flipped bit in a number.
    """
    line = content.encode()
    write_durably(path, line + b"\n" + _seal(line) + b"\n")


def read_sealed(path: Path, schema: Any) -> Any:
    """Read a file that :func:`write_sealed` wrote, as the pydantic type ``schema``."""
    line, _, seal = read_bytes(path).removesuffix(b"\n").rpartition(b"\n")
    if seal != _seal(line):
        raise UserError(f"{format_path(path)} is damaged and cannot be used: its checksum differs")
    return parse_json(line, schema, format_path(path))


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


class HeldFolder:
    """A context that keeps a folder open, to detect that another folder has replaced it.

    Folders are compared by inode number. The file system cannot reuse the number of an open folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def is_in_place(self) -> bool:
        """Return whether the path still leads to the folder that was opened.

        The result is False only if the folder was certainly moved, removed or replaced. If the
        check itself fails, for example with EIO, the result is True.
        """
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._descriptor))
        except OSError as error:
            # NFS raises ESTALE if the opened folder or the folder at the path was removed.
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)


def write_picture(path: Path, figure: Any, dpi: int = 130) -> None:
    """Write a matplotlib figure as a PNG file, atomically."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=dpi)
    write_durably(path, content.getvalue())


def check_replaceable(*paths: Path) -> None:
    """Raise OSError if a path must not be replaced: it exists and is not a regular file."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(mode):
            raise OSError(errno.EEXIST, f"{_kind(mode)} of that name exists", str(path))


def sync_path(folder: Path) -> None:
    """Sync a file or folder to the disk; renames in a folder then survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def format_path(path: Path) -> str:
    """Return a path for a message: shortened, with undecodable bytes escaped."""
    return shorten(str(path).encode(errors="backslashreplace").decode())


def check_utf8(*paths: Path) -> None:
    """Raise UserError if a path is not UTF-8, because safetensors and JSON cannot store it."""
    for path in paths:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{format_path(path)} is not valid UTF-8; give a name that is"
            ) from None


def printable(path: str | Path) -> str:
    r"""Return a file's name as UTF-8 text; bytes that are not UTF-8 become ``\xNN``.

    Every backslash is doubled, so different names always have different texts.
    """
    return os.fsencode(path).replace(b"\\", b"\\\\").decode(errors="backslashreplace")


def shortest_ends(paths: Sequence[PurePath]) -> list[str]:
    """Return for each path its shortest ending that no other path has.

    Example: ``runs/a/hf`` and ``runs/b/hf`` have the endings ``a/hf`` and ``b/hf``. A path without
    such an ending is returned whole, such as ``hf`` beside ``runs/hf``.
    """
    every = Counter(end for path in paths for end in _ends(path))
    return [
        str(PurePath(*next((end for end in _ends(path) if every[end] == 1), path.parts)))
        for path in paths
    ]


def _ends(path: PurePath) -> list[tuple[str, ...]]:
    return [path.parts[-length:] for length in range(1, len(path.parts) + 1)]


def escape(text: str) -> str:
    """Return text with unprintable characters escaped, such as a newline."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def shorten(text: str) -> str:
    """Return text as :func:`escape` does; above 200 characters, without its middle."""
    line = escape(text)
    return line if len(line) <= _SHOWN else f"{line[:120]}...{line[-60:]}"


def os_error_text(error: Exception) -> str:
    """Return the operating system's text for an error, without its number and path."""
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
