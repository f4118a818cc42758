"""The measurements of the benchmark ``data``, and the generators of its corpora.

The benchmark calls each measurement function in a new process.
"""

import json
import multiprocessing
import os
import resource
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np

# torch and Megatron are imported in the functions that use them, because their memory and import
# time must not count in the other measurements.
from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.index.corpus_manifest import (
    CorpusManifest,
    FileRecord,
    TokenizerRecord,
    document_lengths,
    hash_file,
    length_histogram,
)
from diffmegatron.data.index.index_file import write_index
from diffmegatron.data.prepare.encode import loaded
from diffmegatron.data.prepare.parts import Part, merge
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.tokenizers import TiktokenTokenizer, load_tokenizer
from diffmegatron.errors import UserError

ASKED_SHARES = {"web": 0.67, "code": 0.045, "books": 0.285}


def write_text_corpus(path: Path, megabytes: int) -> None:
    """Write Python's standard library as JSON lines, repeated until the size is reached."""
    folder = Path(os.__file__).parent
    texts = [file.read_text(errors="ignore") for file in sorted(folder.glob("*.py"))]
    repeats = -(-megabytes * 1_000_000 // sum(len(text.encode()) for text in texts))
    with path.open("w") as file:
        for text in texts * repeats:
            file.write(json.dumps({"text": text}) + "\n")


def write_corpus(prefix: Path, lengths: np.ndarray, *, sparse: bool) -> None:
    """Write a prepared corpus of the tokenizer ``bytes``: token file, index and manifest.

    The tokens are random, or all 0 in a sparse file. Each takes four bytes, as with a large
    vocabulary.

    Args:
        prefix: path prefix of the files, in a folder that is created if needed.
        lengths: number of tokens of each document, int32 ``[documents]``.
        sparse: whether the token file is sparse, so that it takes no space on the disk.
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
    manifest = CorpusManifest(
        tokenizer=TokenizerRecord(**record),
        settings={"layout": "text"},
        documents=len(lengths),
        tokens=tokens,
        **dict.fromkeys(("text_bytes", "rejected", "empty", "duplicates"), 0),
        lengths=length_histogram(document_lengths(lengths, counts)),
        inputs=(),
        outputs=(output,),
    )
    Path(f"{prefix}.json").write_text(manifest.model_dump_json())


def web_lengths(tokens: int, seed: int, median: float = 600.0) -> np.ndarray:
    """Draw log-normal document lengths, int32 ``[documents]``, with the long tail of web text.

    Args:
        tokens: approximate sum of the lengths.
        seed: seed of the random numbers.
        median: median length in tokens.
    """
    generator = np.random.default_rng(seed)
    mean = median * np.exp(1.3**2 / 2)
    drawn = generator.lognormal(np.log(median), 1.3, int(tokens / mean))
    return np.clip(drawn, 2, 500_000).astype(np.int32)


def corpus_tokens(folder: Path) -> int:
    """Return the number of tokens in all corpora that :func:`write_corpus` wrote to a folder."""
    return sum(file.stat().st_size // 4 for file in folder.glob("*.bin"))


# Tokenising


def bare_loop(path: Path, tokenizer: str) -> dict[str, float]:
    """Return the rates of tiktoken alone, on texts that are already in memory."""
    texts = [json.loads(line)["text"] for line in path.open()]
    chosen = load_tokenizer(tokenizer)
    if not isinstance(chosen, TiktokenTokenizer):
        raise UserError(f"tokenizer {tokenizer!r} is not tiktoken's; give one such as cl100k_base")
    encoding = chosen.encoding
    size = sum(len(text.encode()) for text in texts)
    encoding.encode_ordinary(texts[0])
    wall, cpu = time.perf_counter(), time.process_time()
    for text in texts:
        encoding.encode_ordinary(text)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"MB_per_cpu_second": size / 1e6 / cpu, "MB_per_second": size / 1e6 / wall}


def prepared(path: Path, tokenizer: str, workers: int) -> dict[str, float]:
    """Return the rates of ``prepare``, and the peak memory of this process and its workers."""
    loaded(tokenizer).encode("warm")
    output = path.with_name(f"out{workers}")
    wall, cpu = time.perf_counter(), time.process_time()
    manifest = prepare([path], output, tokenizer, workers=workers, show_progress=False)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu += children.ru_utime + children.ru_stime
    for file in path.parent.glob(f"{output.name}.*"):
        file.unlink()
    megabytes = manifest.text_bytes / 1e6
    return {
        "MB_per_cpu_second": megabytes / cpu,
        "MB_per_second": megabytes / wall,
        "tokens_per_second": manifest.tokens / wall,
        "parent_peak_MiB": peak_memory(),
        "largest_worker_peak_MiB": children.ru_maxrss / 1024 if workers > 1 else 0,
    }


def in_parts(path: Path, tokenizer: str, processes: int, output: Path) -> dict[str, float]:
    """Run processes that each prepare one part of a text at the same time, then merge the parts.

    Returns:
        The rate of all processes together, and the time and rate of the merge. The start-up of the
        processes is not included.
    """
    context = multiprocessing.get_context("spawn")
    all_ready = context.Barrier(processes)
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_ready, initargs=(tokenizer, all_ready)
    ) as pool:
        chosen = [Part(number, processes) for number in range(1, processes + 1)]
        futures = [pool.submit(_prepare_part, path, output, tokenizer, part) for part in chosen]
        times = [future.result() for future in futures]
    wall = max(end for _, end in times) - min(start for start, _ in times)
    started = time.perf_counter()
    manifest = merge(output, show_progress=False)
    merging = time.perf_counter() - started
    megabytes = manifest.text_bytes / 1e6
    return {
        "MB_per_second": megabytes / wall,
        "merge_seconds": merging,
        "merge_MB_of_tokens_per_second": manifest.outputs[0].bytes / 1e6 / merging,
    }


def _ready(tokenizer: str, all_ready: Barrier) -> None:
    loaded(tokenizer).encode("warm")
    all_ready.wait(timeout=600)


def _prepare_part(path: Path, output: Path, tokenizer: str, part: Part) -> tuple[float, float]:
    """Prepare a part; return its start and end in seconds on a clock that all processes share."""
    started = time.monotonic()
    prepare([path], output, tokenizer, part=part, show_progress=False)
    return started, time.monotonic()


# The loader


def our_loader(folder: Path, seq_length: int, samples: int) -> dict[str, float]:
    """Return the start-up time, and the rate of reading batches of one sample.

    The start-up is the time from opening the corpora to the first sample. The batches are read in
    this thread, not in the loader's own thread. The first call for a folder also builds the index
    of the samples.
    """
    from diffmegatron.data.loader import Loader
    from diffmegatron.data.sampling.samples import open_samples

    paths = [{"path": str(folder / n), "weight": w} for n, w in (("one", 0.7), ("two", 0.3))]
    config = DataConfig(tokenizer="bytes", sources=paths)  # type: ignore[arg-type]
    wall = time.perf_counter()
    opened = open_samples(config, seq_length, 1234, "train")
    opened[0]
    startup = time.perf_counter() - wall
    loader = Loader(
        opened,
        micro_batch_size=1,
        global_batch_size=1,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    for step in range(1, samples + 1):
        loader.read_step(step)
    return _rates(startup, samples * seq_length, wall, cpu)


def megatron_loader(folder: Path, seq_length: int, samples: int) -> dict[str, float]:
    """Return the figures of :func:`our_loader` for Megatron's ``BlendedMegatronDatasetBuilder``.

    The first call for a folder and length also builds Megatron's cache.
    """
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import default_collate

    class _Tokenizer:
        # The tokenizer "bytes" has no padding token, and Megatron masks padding tokens. Use an id
        # after the last token as padding, which no text contains, so that nothing is masked.
        vocab_size, eod, eos, pad, unique_identifiers = 257, 256, 256, 257, {"name": "bytes"}

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=([str(folder / "one"), str(folder / "two")], [0.7, 0.3]),
        # Weights of 0 skip the validation and test splits. Megatron would loop forever to build a
        # split that has a weight but no documents.
        split="1,0,0",
        path_to_cache=str(folder / f"megatron{seq_length}"),
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wall = time.perf_counter()
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [corpus_tokens(folder) // seq_length, 0, 0], lambda: True, config
    )
    dataset = builder.build()[0]
    default_collate([dataset[0]])
    startup = time.perf_counter() - wall
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(1, samples + 1):
        default_collate([dataset[index]])
    rates = _rates(startup, samples * seq_length, wall, cpu)
    torch.distributed.destroy_process_group()
    return rates


def _rates(startup: float, tokens: int, wall: float, cpu: float) -> dict[str, float]:
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "startup_seconds": startup,
        "tokens_per_cpu_second": tokens / cpu,
        "tokens_per_second": tokens / wall,
    }


# Start-up


def start(prefix: Path) -> dict[str, float]:
    """Return the time and peak memory of opening a corpus and reading the first sample."""
    from diffmegatron.data.sampling.samples import open_samples

    wall = time.perf_counter()
    config = DataConfig(tokenizer="bytes", sources=[{"path": str(prefix)}])  # type: ignore[list-item]
    open_samples(config, 4096, 1, "train")[0]
    return {"seconds": time.perf_counter() - wall, "peak_MiB": peak_memory()}


# Up-sampling


def shares(folder: Path, mode: str, sampled: int) -> dict[str, Any]:
    """Sample tokens, and return which shares of them come from each source and from long documents.

    A long document has more than 4096 tokens.

    Args:
        folder: folder of the corpora in ``ASKED_SHARES``.
        mode: value of ``data.upsampling.mode``.
        sampled: number of tokens to sample.
    """
    from diffmegatron.data.sampling.samples import open_samples

    config = DataConfig(
        tokenizer="bytes",
        sources=[{"path": str(folder / name), "weight": w} for name, w in ASKED_SHARES.items()],  # type: ignore[misc]
        upsampling={"mode": mode},  # type: ignore[arg-type]
    )
    samples = open_samples(config, 4096, 1, "train")
    tokens, in_long = Counter[str](), 0
    for index in range(sampled // 4096 + 1):
        content, local = samples.history.locate(index)
        source = samples.sources[content]
        pieces = source.blocks.pieces(source.block(local))
        tokens[Path(source.corpus.prefix).name] += 4096
        long = source.corpus.lengths[pieces.documents] > 4096
        in_long += int(pieces.lengths[long].sum())
    total = sum(tokens.values())
    realised = {name: tokens[name] / total for name in ASKED_SHARES}
    return {
        "sampled_tokens": total,
        "realised_share": realised,
        "largest_deviation": max(abs(realised[name] - ASKED_SHARES[name]) for name in ASKED_SHARES),
        "tokens_in_long_documents": in_long / (total + total / 4096),
    }


def peak_memory() -> float:
    """Return the peak memory of this process in MiB, including mapped files.

    It is read from ``/proc``, because the peak of ``getrusage`` can be that of the parent process.
    """
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024
