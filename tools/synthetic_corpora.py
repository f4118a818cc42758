"""Corpora that the data path is measured on: of any size, made up on the spot."""

import json
import os
from pathlib import Path

import numpy as np

from diffmegatron.data.index_file import write_index
from diffmegatron.data.manifest import (
    FileRecord,
    Manifest,
    TokenizerRecord,
    hash_file,
    length_histogram,
)
from diffmegatron.data.tokenizers import load_tokenizer


def write_text_corpus(path: Path, megabytes: int) -> None:
    """JSON lines of the standard library's sources, over and over up to the size."""
    folder = Path(os.__file__).parent
    texts = [file.read_text(errors="ignore") for file in sorted(folder.glob("*.py"))]
    repeats = -(-megabytes * 1_000_000 // sum(len(text.encode()) for text in texts))
    with path.open("w") as file:
        for text in texts * repeats:
            file.write(json.dumps({"text": text}) + "\n")


def write_corpus(prefix: Path, lengths: np.ndarray, *, sparse: bool) -> None:
    """A corpus of the tokenizer ``bytes``; its tokens are random, or a hole in the file.

    They are stored in four bytes each, as those of a large vocabulary are.

    Args:
        prefix: of the files to write, in a folder that is made if it is missing.
        lengths: tokens of each document, int32 ``[documents]``.
        sparse: whether the file of tokens is a hole, which takes no space on the disk.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("bytes")
    dtype, counts = np.dtype(np.int32), np.ones(len(lengths), np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    with Path(f"{prefix}.bin").open("wb") as file:
        if sparse:
            file.truncate(tokens * dtype.itemsize)
        else:
            generator = np.random.default_rng(0)
            generator.integers(tokenizer.end_of_document, size=tokens, dtype=dtype).tofile(file)
    index = Path(f"{prefix}.idx")
    write_index(index, lengths, counts, dtype)
    record = {name: getattr(tokenizer, name) for name in TokenizerRecord.model_fields}
    output = FileRecord(path=index.name, bytes=index.stat().st_size, sha256=hash_file(index))
    manifest = Manifest(
        tokenizer=TokenizerRecord(**record),
        settings={"layout": "text"},
        documents=len(lengths),
        tokens=tokens,
        **dict.fromkeys(("text_bytes", "rejected", "empty", "duplicates"), 0),
        lengths=length_histogram(lengths, counts),
        inputs=(),
        outputs=(output,),
    )
    Path(f"{prefix}.json").write_text(manifest.model_dump_json())


def web_lengths(tokens: int, seed: int, median: float = 600.0) -> np.ndarray:
    """Log-normal lengths with the long tail of web text, about ``tokens`` in all."""
    generator = np.random.default_rng(seed)
    mean = median * np.exp(1.3**2 / 2)
    drawn = generator.lognormal(np.log(median), 1.3, int(tokens / mean))
    return np.clip(drawn, 2, 500_000).astype(np.int32)
