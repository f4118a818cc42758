#!/usr/bin/env python3
"""Measure the data path; each part writes ``benchmarks/results/data_PART.json``.

    tools/bench_data.py tokenise --scratch DIR --megabytes 10 100 1000
    tools/bench_data.py loader --scratch DIR
    tools/bench_data.py startup --scratch DIR --tokens 1e9 1e10 1e11 1e12
    tools/bench_data.py upsampling --scratch DIR

``tokenise`` compares ``prepare`` with a bare loop over tiktoken, ``loader`` the loader with
Megatron's GPTDataset and BlendedDataset on the same files. ``startup`` writes real indices over
sparse token files: a trillion tokens of 4,000-token documents take 9 GB of DIR and of memory.
Rates are per second of the process's own CPU time where they compare single processes, so that
other work on the machine does not count; wall time is beside them.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

# What imports torch and Megatron is imported where it is used: prepare's workers import this file.
from diffmegatron.config.data import DataConfig
from diffmegatron.data.encode import loaded
from diffmegatron.data.index_file import write_index
from diffmegatron.data.manifest import (
    FileRecord,
    Manifest,
    TokenizerRecord,
    hash_file,
    length_histogram,
)
from diffmegatron.data.prepare import prepare
from diffmegatron.data.tokenizers import load_tokenizer

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SEQ_LENGTHS = (4096, 65536)


def machine() -> dict[str, Any]:
    """What the numbers hang on; nothing that names the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(": ")[1] for line in lines if line.startswith("model name")]
    packages = ("numpy", "torch", "tiktoken", "megatron-core", "pyarrow")
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


# Tokenising


def write_text_corpus(path: Path, megabytes: int) -> None:
    """JSON lines of the standard library's sources, over and over up to the size."""
    folder = Path(os.__file__).parent
    texts = [file.read_text(errors="ignore") for file in sorted(folder.glob("*.py"))]
    repeats = -(-megabytes * 1_000_000 // sum(len(text.encode()) for text in texts))
    with path.open("w") as file:
        for text in texts * repeats:
            file.write(json.dumps({"text": text}) + "\n")


def bare_loop(path: Path) -> dict[str, float]:
    """Nothing but tiktoken, on texts that are already decoded in memory."""
    texts = [json.loads(line)["text"] for line in path.open()]
    encoding = load_tokenizer("cl100k_base").encoding  # type: ignore[attr-defined]
    size = sum(len(text.encode()) for text in texts)
    encoding.encode_ordinary(texts[0])
    wall, cpu = time.perf_counter(), time.process_time()
    for text in texts:
        encoding.encode_ordinary(text)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {"MB_per_cpu_second": size / 1e6 / cpu, "MB_per_second": size / 1e6 / wall}


def prepared(path: Path, workers: int) -> dict[str, float]:
    """All of ``prepare``; memory is the sum of the peaks of its processes."""
    loaded("cl100k_base").encode("warm")
    output = path.with_name(f"out{workers}")
    wall, cpu = time.perf_counter(), time.process_time()
    manifest = prepare([path], output, "cl100k_base", workers=workers, show_progress=False)
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


def tokenise(options: argparse.Namespace) -> dict[str, Any]:
    """MB/s of prepare against a bare loop, over sizes and workers."""
    corpora = {}
    for megabytes in options.megabytes:
        corpora[megabytes] = options.scratch / f"text{megabytes}.jsonl"
        write_text_corpus(corpora[megabytes], megabytes)
    # Of a few megabytes the start alone, once per process, takes a tenth.
    compared = sorted(corpora)[len(corpora) // 2]
    path = corpora[compared]
    rounds = [(in_process("bare_loop", path), in_process("prepared", path, 1)) for _ in range(5)]
    ratios = [ours["MB_per_cpu_second"] / bare["MB_per_cpu_second"] for bare, ours in rounds]
    return {
        "tokenizer": "cl100k_base",
        "one_worker": {
            "megabytes": compared,
            "bare_loop_MB_per_cpu_second": [bare["MB_per_cpu_second"] for bare, _ in rounds],
            "prepare_MB_per_cpu_second": [ours["MB_per_cpu_second"] for _, ours in rounds],
            "median_ratio": statistics.median(ratios),
        },
        "sizes": [
            {"megabytes": megabytes, "workers": workers, **in_process("prepared", path, workers)}
            for megabytes, path in corpora.items()
            for workers in (1, os.cpu_count())
        ],
    }


# Corpora without text


def write_corpus(prefix: Path, lengths: np.ndarray, *, sparse: bool) -> None:
    """Documents of these lengths; the tokens are random, or a hole in the file."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    dtype, counts = np.dtype(np.int32), np.ones(len(lengths), np.int32)
    tokens = int(lengths.sum(dtype=np.int64))
    with Path(f"{prefix}.bin").open("wb") as file:
        if sparse:
            file.truncate(tokens * dtype.itemsize)
        else:
            np.random.default_rng(0).integers(0, 100_000, tokens, dtype=np.int32).tofile(file)
    index = Path(f"{prefix}.idx")
    write_index(index, lengths, counts, dtype)
    tokenizer = load_tokenizer("bytes")
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


# The loader


def our_loader(folder: Path, seq_length: int, samples: int) -> dict[str, float]:
    """Start-up with the index already built, and batches of one without the thread."""
    from diffmegatron.data.loader import Loader
    from diffmegatron.data.samples import open_samples

    config = _two_sources(folder)
    wall = time.perf_counter()
    opened = open_samples(config, seq_length, 1234, "train")
    opened[0]
    startup = time.perf_counter() - wall
    loader = Loader(
        opened,
        seq_length=seq_length,
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
    """The same from BlendedMegatronDatasetBuilder, with its cache already built."""
    import torch
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from torch.utils.data import default_collate

    class _Tokenizer:
        vocab_size, eod, eos, pad, unique_identifiers = 100_277, 100_257, 100_257, 0, {"name": "x"}

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=([str(folder / "one"), str(folder / "two")], [0.7, 0.3]),
        split="999,1,0",
        path_to_cache=str(folder / f"megatron{seq_length}"),
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    wall = time.perf_counter()
    builder = BlendedMegatronDatasetBuilder(
        GPTDataset, [_tokens(folder) // seq_length, 1, 0], lambda: True, config
    )
    dataset = builder.build()[0]
    default_collate([dataset[0]])
    startup = time.perf_counter() - wall
    wall, cpu = time.perf_counter(), time.process_time()
    for index in range(1, samples + 1):
        default_collate([dataset[index]])
    return _rates(startup, samples * seq_length, wall, cpu)


def _rates(startup: float, tokens: int, wall: float, cpu: float) -> dict[str, float]:
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "startup_seconds": startup,
        "tokens_per_cpu_second": tokens / cpu,
        "tokens_per_second": tokens / wall,
    }


def _two_sources(folder: Path) -> DataConfig:
    paths = [{"path": str(folder / n), "weight": w} for n, w in (("one", 0.7), ("two", 0.3))]
    return DataConfig(tokenizer="bytes", sources=paths)  # type: ignore[arg-type]


def _tokens(folder: Path) -> int:
    return sum(file.stat().st_size // 4 for file in folder.glob("*.bin"))


def loader(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens/s per process and start-up, ours and Megatron's in turn."""
    folder = options.scratch / "loader"
    shutil.rmtree(folder, ignore_errors=True)
    write_corpus(folder / "one", web_lengths(100_000_000, 1), sparse=False)
    write_corpus(folder / "two", web_lengths(50_000_000, 2, median=2000), sparse=False)
    results = []
    for seq_length in SEQ_LENGTHS:
        samples = 80_000_000 // seq_length
        for name in ("our_loader", "megatron_loader"):
            first = in_process(name, folder, seq_length, samples)
            runs = [in_process(name, folder, seq_length, samples) for _ in range(3)]
            results.append(
                {
                    "loader": name,
                    "seq_length": seq_length,
                    "first_startup_seconds": first["startup_seconds"],
                    **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
                }
            )
    return {"corpus_tokens": _tokens(folder), "results": results}


# Start-up


def start(folder: Path) -> dict[str, float]:
    """Open the corpus and read the first sample."""
    from diffmegatron.data.samples import open_samples

    wall = time.perf_counter()
    config = DataConfig(tokenizer="bytes", sources=[{"path": str(folder / "corpus")}])  # type: ignore[list-item]
    open_samples(config, 4096, 1, "train")[0]
    return {"seconds": time.perf_counter() - wall, "peak_MiB": peak_memory()}


def startup(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first sample, the index built and opened, over corpus sizes."""
    results = []
    for tokens in options.tokens:
        folder = options.scratch / f"startup{tokens:.0e}"
        lengths = np.full(int(tokens) // 4000, 4000, dtype=np.int32)
        write_corpus(folder / "corpus", lengths, sparse=True)
        built, opened = in_process("start", folder), [in_process("start", folder) for _ in range(5)]
        results.append(
            {
                "tokens": int(lengths.sum(dtype=np.int64)),
                "documents": len(lengths),
                "build_seconds": built["seconds"],
                "build_peak_MiB": built["peak_MiB"],
                "startup_seconds": statistics.median(run["seconds"] for run in opened),
                "startup_peak_MiB": statistics.median(run["peak_MiB"] for run in opened),
            }
        )
        shutil.rmtree(folder)
        print(results[-1], file=sys.stderr)
    return {"results": results}


# Up-sampling


def upsampling(options: argparse.Namespace) -> dict[str, Any]:
    """Token shares over a billion tokens of lengths alone, without and with up-sampling."""
    from diffmegatron.data.samples import open_samples

    asked = {"web": 0.67, "code": 0.045, "books": 0.285}
    medians = {"web": 600.0, "code": 900.0, "books": 6000.0}
    folder = options.scratch / "upsampling"
    for number, name in enumerate(asked):
        write_corpus(folder / name, web_lengths(10**8, number, medians[name]), sparse=True)
    results = {}
    for mode in ("none", "per_source", "global"):
        config = DataConfig(
            tokenizer="bytes",
            sources=[{"path": str(folder / name), "weight": asked[name]} for name in asked],  # type: ignore[misc]
            upsampling={"mode": mode},  # type: ignore[arg-type]
        )
        samples = open_samples(config, 4096, 1, "train")
        tokens, in_long = Counter[str](), 0
        for index in range(10**9 // 4096 + 1):
            content, local = samples.history.locate(index)
            source = samples.sources[content]
            pieces = source.blocks.pieces(source.block(local))
            tokens[Path(source.corpus.prefix).name] += 4096
            long = source.corpus.lengths[pieces.documents] > 4096
            in_long += int(pieces.lengths[long].sum())
        total = sum(tokens.values())
        realised = {name: tokens[name] / total for name in asked}
        results[mode] = {
            "sampled_tokens": total,
            "realised_share": realised,
            "largest_deviation": max(abs(realised[name] - asked[name]) for name in asked),
            "tokens_in_long_documents": in_long / (total + total / 4096),
        }
    return {"asked_share": asked, **results}


# Running


def peak_memory() -> float:
    """MiB, mapped files included. Not getrusage: its peak is inherited from the parent process."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def in_process(function: str, *arguments: object) -> dict[str, float]:
    """A function of this file in a fresh process, so that none inherits another's memory."""
    call = [sys.executable, "-W", "ignore", __file__, "call", function, *map(str, arguments)]
    # One thread: torch's others would spin in wait of work and be counted as CPU time.
    single = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, check=True, capture_output=True, text=True, env=single)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run one part and write its result; ``call`` is for :func:`in_process`."""
    if sys.argv[1] == "call":
        arguments = [int(a) if a.isdigit() else Path(a) for a in sys.argv[3:]]
        print(json.dumps(globals()[sys.argv[2]](*arguments)))
        return
    parts = {part.__name__: part for part in (tokenise, loader, startup, upsampling)}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=parts)
    parser.add_argument("--scratch", type=Path, required=True, help="folder for made-up corpora")
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e9, 1e10, 1e11, 1e12])
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    result = {"part": options.part, "machine": machine(), **parts[options.part](options)}
    path = RESULTS / f"data_{options.part}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
