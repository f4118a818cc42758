r"""Measure the preparation or the loading of training data; PART is one of five measurements.

    python -m tools.benchmarks data tokenise --scratch DIR            # 10, 100 and 1000 MB
    python -m tools.benchmarks data tokenise --scratch DIR --tokenizer bytes --megabytes 1 \
        --name /tmp/x
    python -m tools.benchmarks data parts --scratch DIR               # 1 and 2 processes
    python -m tools.benchmarks data loader --scratch DIR
    python -m tools.benchmarks data startup --scratch DIR --tokens 1e9 1e10    # default: up to 1e12
    python -m tools.benchmarks data upsampling --scratch DIR

"tokenise" compares `prepare` with a bare loop over tiktoken. "parts" measures the wall time of
several processes that each prepare one part of a text, and needs cores that nothing else uses.
"loader" compares the loader with Megatron's GPTDataset and BlendedDataset on the same files.
"startup" measures the time to the first sample. It writes token files without content (sparse) and
their complete indexes, which take 9 GB of DIR and 12 GiB of memory for a trillion tokens.
"upsampling" counts the sampled tokens of each source.

Each measurement prints its result and writes docs/results/NAME.json. Corpora are generated in a new
folder in DIR; this folder is removed at the end. Rates that compare single processes are per second
of CPU time, so that other work on the machine does not count; wall time is reported too.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.measurements.machine import cpu_name
from tools.benchmarks.data_measurements import (
    ASKED_SHARES,
    bare_loop,
    corpus_tokens,
    in_parts,
    megatron_loader,
    our_loader,
    prepared,
    shares,
    start,
    web_lengths,
    write_corpus,
    write_text_corpus,
)
from tools.paths import RESULTS

MEDIAN_LENGTHS = {"web": 600.0, "code": 900.0, "books": 6000.0}

Result = TypeVar("Result")


def machine() -> dict[str, Any]:
    """Return CPU, memory, load and package versions, which influence the measurements."""
    packages = ("numpy", "torch", "tiktoken", "megatron-core", "pyarrow")
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }


def tokenise(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the MB/s of prepare by text size and workers, and of a bare loop over tiktoken."""
    tokenizer = options.tokenizer
    load_tokenizer(tokenizer)  # A wrong name must fail before gigabytes are written.
    corpora = {}
    for megabytes in options.megabytes:
        corpora[megabytes] = folder / f"text{megabytes}.jsonl"
        write_text_corpus(corpora[megabytes], megabytes)
    # Compare with the bare loop on the text of middle size. With the smallest text, of a few
    # megabytes, the start of each process would be a tenth of the time.
    compared = sorted(corpora)[len(corpora) // 2]
    path = corpora[compared]
    rounds = [
        (in_process(bare_loop, path, tokenizer), in_process(prepared, path, tokenizer, 1))
        for _ in range(options.repeats)
    ]
    ratios = [ours["MB_per_cpu_second"] / bare["MB_per_cpu_second"] for bare, ours in rounds]
    return {
        "tokenizer": tokenizer,
        "one_worker": {
            "megabytes": compared,
            "bare_loop_MB_per_cpu_second": [bare["MB_per_cpu_second"] for bare, _ in rounds],
            "prepare_MB_per_cpu_second": [ours["MB_per_cpu_second"] for _, ours in rounds],
            "median_ratio": statistics.median(ratios),
        },
        "sizes": [
            {
                "megabytes": megabytes,
                "workers": workers,
                **in_process(prepared, path, tokenizer, workers),
            }
            for megabytes, path in corpora.items()
            for workers in (1, os.cpu_count() or 1)
        ],
    }


def parts(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the MB/s of processes that prepare one part of a text each, and the merge's time."""
    load_tokenizer(options.tokenizer)
    path = folder / "text.jsonl"
    write_text_corpus(path, options.megabytes)
    results: list[dict[str, Any]] = []
    for processes in options.processes:
        runs = [
            in_parts(path, options.tokenizer, processes, folder / f"out{processes}.{number}")
            for number in range(options.repeats)
        ]
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results.append({"processes": processes, **medians})
        print(results[-1], file=sys.stderr)
    return {
        "tokenizer": options.tokenizer,
        "megabytes": options.megabytes,
        "repeats": options.repeats,
        "results": results,
    }


def loader(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens/s and start-up time of this loader and of Megatron's, one process each."""
    # Read about half of the tokens (80 of 150 million), so that no document is read twice.
    asked = options.tokens * 8 // 15
    if asked < max(options.seq_lengths):
        raise UserError(
            f"--tokens {options.tokens} is too few for a sequence of "
            f"{max(options.seq_lengths)}; give at least twice as many tokens as a sequence has"
        )
    write_corpus(folder / "one", web_lengths(options.tokens * 2 // 3, 1), sparse=False)
    write_corpus(folder / "two", web_lengths(options.tokens // 3, 2, median=2000), sparse=False)
    results = []
    for seq_length in options.seq_lengths:
        samples = asked // seq_length
        for read in (our_loader, megatron_loader):
            first = in_process(read, folder, seq_length, samples)
            runs = [in_process(read, folder, seq_length, samples) for _ in range(options.repeats)]
            results.append(
                {
                    "loader": read.__name__,
                    "seq_length": seq_length,
                    "first_startup_seconds": first["startup_seconds"],
                    **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
                }
            )
    return {"corpus_tokens": corpus_tokens(folder), "results": results}


def startup(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds to the first sample, with a new and an existing index, by corpus size."""
    results = []
    for tokens in options.tokens:
        corpus = folder / str(tokens)
        lengths = np.full(max(tokens // 4000, 1), 4000, dtype=np.int32)
        write_corpus(corpus / "corpus", lengths, sparse=True)
        built = in_process(start, corpus / "corpus")
        opened = [in_process(start, corpus / "corpus") for _ in range(options.repeats)]
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
        shutil.rmtree(corpus)
        print(results[-1], file=sys.stderr)
    return {"results": results}


def upsampling(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the share of each source in the sampled tokens, for each mode of up-sampling."""
    for number, name in enumerate(ASKED_SHARES):
        lengths = web_lengths(options.tokens // 10, number, MEDIAN_LENGTHS[name])
        write_corpus(folder / name, lengths, sparse=True)
    modes = ("none", "per_source", "global")
    results = {mode: in_process(shares, folder, mode, options.tokens) for mode in modes}
    return {"asked_share": ASKED_SHARES, **results}


def in_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Run a function in a new process, whose memory starts empty, and return its result.

    Raises:
        UserError: If the process was killed.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise UserError(
                f"the process of {function.__name__} was killed, which happens when memory runs "
                "out; measure a smaller size"
            ) from None


MEASUREMENTS = {
    measure.__name__: measure for measure in (tokenise, parts, loader, startup, upsampling)
}


def main(options: argparse.Namespace) -> None:
    """Run one measurement, print its result and write it."""
    path = RESULTS / f"{options.name}.json"
    for directory in (path.parent, options.scratch):
        directory.mkdir(parents=True, exist_ok=True)
    # These variables are for the child processes. With more threads, torch would spin while it
    # waits for work, which counts as CPU time.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    described = machine()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        measured = MEASUREMENTS[options.part](Path(folder), options)
    text = json.dumps({"part": options.part, "machine": described, **measured}, indent=1)
    print(text)
    path.write_text(text + "\n")
    print(f"wrote {path}")
