"""Compare the data files of a corpus with the sizes and hashes in its manifest ``PREFIX.json``."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from diffmegatron.data.index.corpus_manifest import (
    Manifest,
    manifest_path,
    parts_folder,
    pieces,
    read_manifest,
)
from diffmegatron.data.index.index_file import IndexHeader, read_header
from diffmegatron.errors import UserError
from diffmegatron.files import file_size, format_path

_HASHED_AT_ONCE = 1 << 30


def data_files(manifest: Manifest) -> tuple[str, ...]:
    """Return the suffixes of the data files, such as ``.bin`` or ``.parts/NAME``, ``.idx`` last."""
    parts = tuple(f".parts/{part.path}" for part in manifest.parts)
    return (*(parts or (".bin",)), ".idx")


def check_sizes(prefix: str | Path, manifest: Manifest) -> IndexHeader:
    """Compare file sizes and the number of documents with the manifest; return the index header."""
    header = read_header(Path(f"{prefix}.idx"))
    name = format_path(manifest_path(prefix))
    for part in manifest.parts:
        path = parts_folder(prefix) / part.path
        if (size := file_size(path)) != part.bytes:
            raise UserError(
                f"{format_path(path)} has {size} bytes, but {name} has {part.bytes}; copy it "
                "again, or prepare that part again"
            )
    data = Path(f"{prefix}.bin")
    size = sum(part.bytes for part in manifest.parts) or file_size(data)
    wanted = manifest.tokens * header.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{format_path(data)} has {size} bytes, but {name} has {manifest.tokens} tokens of "
            f"{header.dtype.itemsize} bytes ({wanted}); copy or prepare it again"
        )
    if header.documents != manifest.documents:
        raise UserError(
            f"index {format_path(Path(f'{prefix}.idx'))} has {header.documents} documents, but "
            f"{name} has {manifest.documents}; copy or prepare it again"
        )
    return header


def check_hash(prefix: str | Path, suffix: str) -> Iterator[None]:
    """Compare the hash of one data file with the manifest; ``suffix`` is from :func:`data_files`.

    The generator yields after every GiB and at the end of the file, for other work of the caller.
    """
    path, manifest = Path(f"{prefix}{suffix}"), read_manifest(prefix)
    # The files may have been renamed to another prefix, so find the recorded hash by suffix.
    recorded = {Path(output.path).suffix: output.sha256 for output in manifest.outputs}
    recorded |= {f".parts/{part.path}": part.sha256 for part in manifest.parts}
    digest, read = hashlib.sha256(), 0
    for piece in pieces(path):
        digest.update(piece)
        read += len(piece)
        if read >= _HASHED_AT_ONCE:
            read = 0
            yield
    yield
    if digest.hexdigest() != recorded.get(suffix):
        raise UserError(
            f"{format_path(path)} is damaged: its sha256 is not that of "
            f"{format_path(manifest_path(prefix))}; copy or prepare it again"
        )


def check_hashes(prefix: str | Path) -> Manifest:
    """Check first the sizes and then the hashes of all data files; return the manifest."""
    manifest = read_manifest(prefix)
    check_sizes(prefix, manifest)
    for suffix in data_files(manifest):
        list(check_hash(prefix, suffix))
    return manifest
