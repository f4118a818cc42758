"""Compare ``PREFIX.bin`` (or its parts) and ``PREFIX.idx`` with ``PREFIX.json``.

Comparing sizes is fast and detects missing, truncated and foreign files. Comparing hashes reads
every byte and detects everything else, such as flipped bits or a lost block.
"""

from collections.abc import Iterator
from pathlib import Path

from diffmegatron.data.index.corpus_manifest import (
    Manifest,
    hash_in_parts,
    manifest_path,
    parts_folder,
    read_manifest,
)
from diffmegatron.data.index.index_file import IndexHeader, read_header
from diffmegatron.errors import UserError
from diffmegatron.files import file_size, shown


def data_files(manifest: Manifest) -> tuple[str, ...]:
    """Return the endings of the data files after PREFIX, the index last."""
    parts = tuple(f".parts/{part.path}" for part in manifest.parts)
    return (*(parts or (".bin",)), ".idx")


def check_sizes(prefix: str | Path, manifest: Manifest) -> IndexHeader:
    """Compare the sizes and counts of the files with the manifest, without reading tokens.

    Raises:
        UserError: a file is missing, truncated or of another corpus.
    """
    header = read_header(Path(f"{prefix}.idx"))
    name = shown(manifest_path(prefix))
    for part in manifest.parts:
        path = parts_folder(prefix) / part.path
        if (size := file_size(path)) != part.bytes:
            raise UserError(
                f"{shown(path)} has {size} bytes, but {name} has {part.bytes}; copy it again, or "
                "prepare that part again"
            )
    data = Path(f"{prefix}.bin")
    size = sum(part.bytes for part in manifest.parts) or file_size(data)
    wanted = manifest.tokens * header.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{shown(data)} has {size} bytes, but {name} has {manifest.tokens} tokens of "
            f"{header.dtype.itemsize} bytes ({wanted}); copy or prepare it again"
        )
    if header.documents != manifest.documents:
        raise UserError(
            f"index {shown(Path(f'{prefix}.idx'))} has {header.documents} documents, but {name} "
            f"has {manifest.documents}; copy or prepare it again"
        )
    return header


def check_hash(prefix: str | Path, suffix: str) -> Iterator[None]:
    """Compare the hash of ``PREFIX`` + ``suffix`` (:func:`data_files`), yielding after every GiB.

    Raises:
        UserError: the file cannot be read, or its sha256 differs from the manifest's.
    """
    path, manifest = Path(f"{prefix}{suffix}"), read_manifest(prefix)
    # Files may have been copied to another prefix, so only the suffix of a recorded name is used.
    recorded = {Path(output.path).suffix: output.sha256 for output in manifest.outputs}
    recorded |= {f".parts/{part.path}": part.sha256 for part in manifest.parts}
    sha256 = ""
    for sofar in hash_in_parts(path):
        sha256 = sofar
        yield
    if sha256 != recorded.get(suffix):
        raise UserError(
            f"{shown(path)} is damaged: its sha256 is not that of {shown(manifest_path(prefix))}; "
            "copy or prepare it again"
        )


def check_hashes(prefix: str | Path) -> Manifest:
    """Check sizes, then the hashes of all files; return the manifest.

    Raises:
        UserError: a file is missing or damaged.
    """
    manifest = read_manifest(prefix)
    check_sizes(prefix, manifest)
    for suffix in data_files(manifest):
        for _ in check_hash(prefix, suffix):
            pass
    return manifest
