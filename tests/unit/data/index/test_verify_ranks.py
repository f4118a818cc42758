"""Tests of ``data.verify: hashes`` on two ranks.

Each rank checks some of the files. If one rank finds a damaged file, both ranks raise its error.
"""

import json
import multiprocessing
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.index import corpus_manifest
from diffmegatron.data.prepare.parts import Part, merge
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.training.compute import batches
from diffmegatron.training.compute.batches import verify_sources

RANKS = 2
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.forks.preloaded"])


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    """Return settings with the sources ``a``, ``b`` and ``c``; ``c`` has two parts.

    The files of ``a`` have more than the 1000 bytes that :func:`verify` lets a rank hash at once.
    """
    for number, name in enumerate("abc"):
        texts = [f"{name} {line}" for line in range(500 if number == 0 else 5)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
        for part in (Part(1, 2), Part(2, 2)) if name == "c" else (None,):
            inputs = [tmp_path / f"{name}.jsonl"]
            prepare(inputs, tmp_path / name, "bytes", part=part, show_progress=False)
    merge(tmp_path / "c", show_progress=False)
    return DataConfig.model_validate(
        {
            "tokenizer": "bytes",
            "sources": [{"path": str(tmp_path / name)} for name in "abc"],
            "verify": "hashes",
        }
    )


def verify(rank: int, data: DataConfig, meeting: Path, results: Any) -> None:
    """Verify the sources as one of two ranks, and put the outcome into ``results``.

    The outcome is a tuple of the rank, the sorted names of the files that the rank read, and the
    message of its ``UserError`` ("" without an error).

    Args:
        rank: number of the rank.
        data: settings of the data.
        meeting: file through which the ranks form a process group.
        results: queue for the outcomes of the ranks.
    """
    read: list[str] = []
    real = batches.check_hash

    def noting(path: str, suffix: str) -> Any:
        read.append(Path(path).name + suffix)
        return real(path, suffix)

    store = distributed.FileStore(str(meeting), RANKS)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    parallel_state: Any = mock.Mock(rank=rank, world_size=RANKS, device=torch.device("cpu"))
    corpus_manifest._READ_BYTES = corpus_manifest._HASHED_AT_ONCE = 1000
    batches.check_hash = noting
    try:
        verify_sources(data, parallel_state, nullcontext)
        results.put((rank, sorted(read), ""))
    except UserError as error:
        results.put((rank, sorted(read), str(error)))
    distributed.destroy_process_group()


def on_all_ranks(data: DataConfig, folder: Path) -> list[tuple[int, list[str], str]]:
    results = CONTEXT.Queue()
    arguments = (data, folder / "meeting", results)
    ranks = [CONTEXT.Process(target=verify, args=(rank, *arguments)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=600) for _ in ranks)
    for rank in ranks:
        rank.join()
    return found


def test_every_file_is_read_by_one_rank(data: DataConfig, tmp_path: Path) -> None:
    first, second = on_all_ranks(data, tmp_path)
    assert (first[2], second[2]) == ("", "")
    parts = ["c.parts/00001-of-00002.bin", "c.parts/00002-of-00002.bin"]
    assert first[1] == ["a.bin", "a.idx", "c.idx", parts[0]]
    assert second[1] == ["b.bin", "b.idx", parts[1]]


def test_damage_found_by_one_rank_is_raised_on_all_ranks(data: DataConfig, tmp_path: Path) -> None:
    content = bytearray((tmp_path / "b.bin").read_bytes())
    content[10] ^= 1
    (tmp_path / "b.bin").write_bytes(content)
    first, second = on_all_ranks(data, tmp_path)
    assert first[2] == second[2]
    assert "b.bin is damaged: its sha256 is not that of" in first[2]
    assert first[2].endswith("(rank 1)")


def test_verifying_sizes_computes_no_hashes(data: DataConfig) -> None:
    parallel_state: Any = mock.Mock(rank=0, world_size=1)
    sizes = DataConfig.model_validate({**data.model_dump(), "verify": "sizes"})
    with mock.patch.object(batches, "check_hash", side_effect=AssertionError):
        verify_sources(sizes, parallel_state, nullcontext)
