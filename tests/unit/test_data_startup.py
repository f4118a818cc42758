"""Opening a corpus takes a time and a memory that do not grow with it."""

import struct
import time
from pathlib import Path

import numpy as np

from diffmegatron.data.manifest import FileRecord, Manifest, TokenizerRecord
from diffmegatron.data.store import open_corpus
from diffmegatron.data.tokenizers import load_tokenizer

DOCUMENTS, LENGTH = 100_000_000, 1000


def write_sparse_corpus(prefix: Path) -> None:
    """A hundred billion tokens: only the header and the last entry of each array are written."""
    tokenizer = load_tokenizer("bytes")
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(2 * DOCUMENTS * LENGTH)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, DOCUMENTS, DOCUMENTS + 1))
        file.seek(34 + 4 * (DOCUMENTS - 1))
        file.write(np.int32(LENGTH).tobytes())
        file.seek(34 + 12 * DOCUMENTS - 8)
        file.write(np.int64(2 * LENGTH * (DOCUMENTS - 1)).tobytes())
        file.seek(34 + 20 * DOCUMENTS)
        file.write(np.int64(DOCUMENTS).tobytes())
    manifest = Manifest(
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
    )
    Path(f"{prefix}.json").write_text(manifest.model_dump_json())


def resident_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def test_opening_is_constant_in_time_and_memory(tmp_path: Path) -> None:
    write_sparse_corpus(tmp_path / "sparse")
    before, started = resident_bytes(), time.process_time()
    corpus = open_corpus(str(tmp_path / "sparse"))
    assert time.process_time() - started < 0.1
    assert resident_bytes() - before < 1 << 20, "arrays are views of the files"
    assert corpus.num_documents == DOCUMENTS
    assert len(corpus.tokens) == DOCUMENTS * LENGTH
