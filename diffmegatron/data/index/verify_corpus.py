"""Verify the tokens and the index of a corpus against its manifest ``PREFIX.json``.

The manifest records the size and the hash of each file. The index is ``PREFIX.idx``. The tokens are
in ``PREFIX.bin`` or, for a merged corpus, in the files of the folder ``PREFIX.parts``. The
comparison of sizes is fast and detects missing and truncated files, and files of another corpus.
The comparison of hashes reads every byte and detects all other damage, such as flipped bits.
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
from diffmegatron.files import file_size, format_path


def data_files(manifest: Manifest) -> tuple[str, ...]:
    """Return the suffixes of the data files, such as ``.bin``; the index ``.idx`` is last.

    PREFIX followed by a suffix is the path of a file.
    """
    parts = tuple(f".parts/{part.path}" for part in manifest.parts)
    return (*(parts or (".bin",)), ".idx")


def check_sizes(prefix: str | Path, manifest: Manifest) -> IndexHeader:
    """Compare file sizes and the number of documents with the manifest, without reading tokens.

    Returns:
        The header of the index.

    Raises:
        UserError: a file is missing, truncated or belongs to another corpus.
    """
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
    """Compare the hash of one data file with the manifest.

    This generator yields after every GiB, so that the caller can do other work in between.

    Args:
        prefix: prefix of the corpus.
        suffix: suffix of the file, one of those that :func:`data_files` returns.

    Raises:
        UserError: the file cannot be read, or its sha256 differs from the hash in the manifest.
    """
    path, manifest = Path(f"{prefix}{suffix}"), read_manifest(prefix)
    # The files may have been copied to another prefix, so find the recorded hash by the suffix of
    # the file and not by its name.
    recorded = {Path(output.path).suffix: output.sha256 for output in manifest.outputs}
    recorded |= {f".parts/{part.path}": part.sha256 for part in manifest.parts}
    sha256 = ""
    for sofar in hash_in_parts(path):
        sha256 = sofar
        yield
    if sha256 != recorded.get(suffix):
        raise UserError(
            f"{format_path(path)} is damaged: its sha256 is not that of "
            f"{format_path(manifest_path(prefix))}; copy or prepare it again"
        )


def check_hashes(prefix: str | Path) -> Manifest:
    """Check first the sizes and then the hashes of all data files, and return the manifest.

    Raises:
        UserError: a file is missing or damaged.
    """
    manifest = read_manifest(prefix)
    check_sizes(prefix, manifest)
    for suffix in data_files(manifest):
        for _ in check_hash(prefix, suffix):
            pass
    return manifest
