"""The time and memory to open a corpus do not grow with its size."""

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from diffmegatron.data.index.corpus_manifest import CorpusManifest, FileRecord, TokenizerRecord
from diffmegatron.data.index.token_store import open_corpus
from diffmegatron.data.tokenizers import load_tokenizer

DOCUMENTS, LENGTH = 100_000_000, 1000


def write_sparse_corpus(prefix: Path, parts: int) -> None:
    """Write a corpus of 100 billion tokens as sparse files.

    Only the header of the index and the last entry of each of its arrays are written. All other
    bytes of the index and of the token files are holes, which are read as zeros.

    Args:
        prefix: prefix of the corpus.
        parts: number of token files of a merged corpus; 0 for a corpus with one ``.bin`` file.
    """
    tokenizer = load_tokenizer("bytes")
    size = 2 * DOCUMENTS * LENGTH
    names = [f"{number:05}-of-{parts:05}.bin" for number in range(1, parts + 1)] if parts else []
    records = [FileRecord(path=name, bytes=size // parts, sha256="") for name in names]
    Path(f"{prefix}.parts").mkdir()
    for path in [Path(f"{prefix}.parts/{name}") for name in names] or [Path(f"{prefix}.bin")]:
        with path.open("wb") as file:
            file.truncate(size // max(1, parts))
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, DOCUMENTS, DOCUMENTS + 1))
        file.seek(34 + 4 * (DOCUMENTS - 1))
        file.write(np.int32(LENGTH).tobytes())
        file.seek(34 + 12 * DOCUMENTS - 8)
        file.write(np.int64(2 * LENGTH * (DOCUMENTS - 1)).tobytes())
        file.seek(34 + 20 * DOCUMENTS)
        file.write(np.int64(DOCUMENTS).tobytes())
    manifest = CorpusManifest(
        tokenizer=TokenizerRecord(
            name="bytes", sha256=tokenizer.sha256, vocab_size=257, end_of_document=256
        ),
        settings={"layout": "text"},
        documents=DOCUMENTS,
        tokens=DOCUMENTS * LENGTH,
        text_bytes=0,
        rejected=0,
        empty=0,
        duplicates=0,
        lengths=(),
        inputs=(),
        outputs=(FileRecord(path="sparse.bin", bytes=0, sha256=""),),
        parts=tuple(records),
    )
    Path(f"{prefix}.json").write_text(manifest.model_dump_json())


def resident_bytes() -> int:
    """Return the bytes of this process's resident memory, without mapped files."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


@pytest.mark.parametrize("parts", [0, 64])
def test_opening_is_constant_in_time_and_memory(tmp_path: Path, parts: int) -> None:
    write_sparse_corpus(tmp_path / "sparse", parts)
    before, started = resident_bytes(), time.process_time()
    corpus = open_corpus(str(tmp_path / "sparse"))
    assert time.process_time() - started < 0.1
    assert resident_bytes() - before < 1 << 20, "the arrays are memory-mapped, not read"
    assert len(corpus.lengths) == DOCUMENTS
    assert len(corpus.tokens) == DOCUMENTS * LENGTH
    assert corpus.tokens[DOCUMENTS * LENGTH - 3 :].tolist() == [0, 0, 0]
