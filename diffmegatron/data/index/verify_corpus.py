"""Whether ``PREFIX.bin`` (or its parts) and ``PREFIX.idx`` are what ``PREFIX.json`` says of them.

Sizes take no time and catch files that are missing, cut short or of another corpus. Hashes read
every byte and catch everything else: flipped bits, zeros where a disk lost a block.
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
    """What PREFIX is followed by in the names of the files that hold a corpus, its index last."""
    parts = tuple(f".parts/{part.path}" for part in manifest.parts)
    return (*(parts or (".bin",)), ".idx")


def check_sizes(prefix: str | Path, manifest: Manifest) -> IndexHeader:
    """Compare what the three files say of each other, without reading tokens.

    Raises:
        UserError: a file is missing, no ordinary file or truncated, or one is of another corpus.
    """
    header = read_header(Path(f"{prefix}.idx"))
    said = shown(manifest_path(prefix))
    for part in manifest.parts:
        path = parts_folder(prefix) / part.path
        if (size := file_size(path)) != part.bytes:
            raise UserError(
                f"{shown(path)} has {size} bytes, but {said} says {part.bytes}; copy it again, or "
                "prepare that part again"
            )
    data = Path(f"{prefix}.bin")
    size = sum(part.bytes for part in manifest.parts) or file_size(data)
    wanted = manifest.tokens * header.dtype.itemsize
    if size != wanted:
        raise UserError(
            f"{shown(data)} has {size} bytes, but {said} says {manifest.tokens} tokens of "
            f"{header.dtype.itemsize} bytes ({wanted}); copy or prepare it again"
        )
    if header.documents != manifest.documents:
        raise UserError(
            f"index {shown(Path(f'{prefix}.idx'))} has {header.documents} documents, but {said} "
            f"says {manifest.documents}; copy or prepare it again"
        )
    return header


def check_hash(prefix: str | Path, suffix: str) -> Iterator[None]:
    """Read ``PREFIX`` + ``suffix`` (of :func:`data_files`), giving way after every gibibyte.

    Raises:
        UserError: it cannot be read, or has another sha256 than the manifest says.
    """
    path, manifest = Path(f"{prefix}{suffix}"), read_manifest(prefix)
    # Only the suffix of a recorded name holds: files may be copied to another prefix.
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
    """Sizes first, then every byte of both files; what they are.

    Raises:
        UserError: as :func:`check_sizes` and :func:`check_hash`.
    """
    manifest = read_manifest(prefix)
    check_sizes(prefix, manifest)
    for suffix in data_files(manifest):
        for _ in check_hash(prefix, suffix):
            pass
    return manifest
