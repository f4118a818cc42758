"""Reading a randomly damaged file succeeds or raises an error of one sentence."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.data.prepare.encode import encode_batch
from diffmegatron.data.prepare.journal import (
    Journal,
    JournalState,
    PreparationIdentity,
    last_commit,
)
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.sampling.array_cache import cached_arrays
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.errors import UserError

CASES = 150
TEXTS = [f"document {number} " * (1 + number % 7) for number in range(60)]


def damaged(good: bytes, pick: random.Random) -> bytes:
    """Return a damaged copy of ``good``, or in about a tenth of the calls only random bytes.

    In a copy, ranges are overwritten, removed or doubled, or random bytes are inserted before them.
    About a fifth of the copies are also truncated.
    """
    if pick.random() < 0.1:
        return pick.randbytes(pick.randrange(200))
    content = bytearray(good)
    for _ in range(pick.choice([1, 1, 2, 8])):
        place = pick.randrange(len(content) + 1)
        length = min(pick.choice([1, 2, 8, 100]), len(content) - place)
        content[place : place + length] = pick.choice(
            [
                pick.randbytes(length),
                b"",
                b"\0" * length,
                b"\xff" * length,
                pick.randbytes(pick.choice([1, 9])) + bytes(content[place : place + length]),
                2 * bytes(content[place : place + length]),
            ]
        )
    return bytes(content[: pick.randrange(len(content) + 1)] if pick.random() < 0.2 else content)


def try_all(path: Path, read: Callable[[], Any]) -> None:
    """Check that each read of a damaged file succeeds or raises a short ``UserError`` of one line.

    More than a tenth of the cases must raise an error. The undamaged file is read at the end.
    """
    good, pick, sentences = path.read_bytes(), random.Random(path.name), 0
    for case in range(CASES):
        path.write_bytes(damaged(good, pick))
        try:
            read()
        except UserError as error:
            sentences += 1
            assert "\n" not in str(error) and len(str(error)) < 1000, f"case {case}"
        except BaseException as error:
            raise AssertionError(f"case {case}: {error!r}") from error
    assert sentences > CASES // 10
    path.write_bytes(good)
    read()


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def parquet(path: Path) -> bytes:
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    table = pyarrow.table({"text": TEXTS, "messages": chats, "id": range(len(TEXTS))})
    pyarrow.parquet.write_table(table, path, row_group_size=20)
    return path.read_bytes()


@pytest.mark.parametrize("suffix", ["jsonl.gz", "jsonl.zst", "txt.gz", "parquet"])
@pytest.mark.parametrize("layout", ["text", "chat"])
def test_archives(tmp_path: Path, suffix: str, layout: Any) -> None:
    path = tmp_path / f"in.{suffix}"
    pack = gzip.compress if suffix.endswith("gz") else zstandard.ZstdCompressor().compress
    path.write_bytes(parquet(path) if suffix == "parquet" else pack(jsonl(TEXTS)))
    settings = PrepareSettings("bytes", layout, id_field="id", deduplicate=True)

    def read() -> None:
        (file,) = find_files([path], "*")
        records = read_records(file, settings.columns, 1 << 20)
        encode_batch([(file, record) for record in records], settings)

    try_all(path, read)


@pytest.mark.parametrize("layout", ["text", "chat"])
def test_lines_are_documents_or_rejects(tmp_path: Path, layout: Any) -> None:
    path, pick = tmp_path / "in.jsonl", random.Random(0)
    settings = PrepareSettings("bytes", layout, id_field="id", deduplicate=True)
    chats = [{"messages": [{"role": "assistant", "content": text}], "text": text} for text in TEXTS]
    good = b"".join(json.dumps(chat).encode() + b"\n" for chat in chats)
    for _ in range(2 * CASES):
        path.write_bytes(damaged(good, pick))
        (file,) = find_files([path], "*")
        records = list(read_records(file, settings.columns, 1 << 20))
        found = encode_batch([(file, record) for record in records], settings)
        assert len(found.counts) + len(found.rejects) + found.empty == len(records)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    (tmp_path / "in.jsonl").write_bytes(jsonl(TEXTS))
    prepare([tmp_path / "in.jsonl"], tmp_path / "out", "bytes", show_progress=False)
    return tmp_path / "out"


def test_manifests(prefix: Path) -> None:
    try_all(Path(f"{prefix}.json"), lambda: read_corpus_manifest(prefix))


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
@pytest.mark.parametrize("built", [True, False])
def test_prepared_corpora(prefix: Path, tmp_path: Path, suffix: str, built: bool) -> None:
    """Check that a damaged corpus is read or refused, with and without a cached index.

    The undamaged corpus is read first, which writes the index to the cache.
    """
    sources = [{"path": str(prefix)}]
    config = DataConfig.model_validate(
        {"tokenizer": "bytes", "sources": sources, "cache_dir": str(tmp_path / "cache")}
    )

    def read() -> None:
        if not built:
            for path in tmp_path.glob("cache/*/contents.json"):
                path.unlink()
        samples = open_samples(config, 32, 1, "train")
        for index in range(0, 200, 3):
            assert samples[index].tokens.shape == (33,)

    read()
    try_all(Path(f"{prefix}{suffix}"), read)


def test_fine_tuning_corpora(tmp_path: Path) -> None:
    pairs = [{"prompt": text, "response": text[:9]} for text in TEXTS]
    lines = b"".join(json.dumps(pair).encode() + b"\n" for pair in pairs)
    (tmp_path / "in.jsonl").write_bytes(lines)
    prefix = tmp_path / "out"
    prepare(
        [tmp_path / "in.jsonl"], prefix, "bytes", layout="instruction", show_progress=False
    )  # fmt: skip
    sources = [{"path": str(prefix)}]
    config = DataConfig.model_validate(
        {"tokenizer": "bytes", "sources": sources, "packing": "best_fit"}
    )

    def read() -> None:
        samples = open_samples(config, 64, 1, "train")
        for index in range(100):
            assert samples[index].tokens.shape == (65,)

    read()
    try_all(Path(f"{prefix}.idx"), read)


def test_journals(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    identity = PreparationIdentity(settings={"layout": "text"}, files=(("in.jsonl", 3, 4),))
    with Journal(folder, ("tokens",), None) as journal:
        journal.append("tokens", b"1234" * 20)
        journal.commit(JournalState(identity=identity))

    def read() -> None:
        commit = last_commit(folder)
        assert commit is not None and commit.state.identity == identity
        Journal(folder, ("tokens",), commit).close()

    try_all(folder / "journal.json", read)
    try_all(folder / "tokens", read)


@pytest.mark.parametrize("name", ["contents.json", "ends.int64"])
def test_caches(tmp_path: Path, name: str) -> None:
    """Check that a damaged cache entry is rebuilt and causes no error."""
    ends, pick = np.arange(50, dtype=np.int64), random.Random(name)
    # Each case syncs files to the disk, so there are fewer cases.
    for _ in range(CASES // 3):
        arrays, summary = cached_arrays(tmp_path, ("key",), lambda: ({"ends": ends}, {"a": 1}))
        assert summary == {"a": 1} and np.array_equal(arrays["ends"], ends)
        (path,) = tmp_path.glob(f"*/{name}")
        path.write_bytes(damaged(path.read_bytes(), pick))
