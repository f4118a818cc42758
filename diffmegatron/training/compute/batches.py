"""Microbatches of one rank: verify the data files, open the loader, move batches to the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.zigzag import shard_sequence
from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import check_hash, data_files, read_corpus_manifest
from diffmegatron.data.loader import Batch, Loader
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.parallel.parallel_state import ParallelState, errors_on_all_ranks

# Fields of Batch [sequences, positions] that are sharded for context parallelism.
_BY_TOKEN = ("tokens", "labels", "loss_mask")


def verify_sources(
    data: DataConfig,
    parallel_state: ParallelState,
    extend_limit: Callable[[], AbstractContextManager[None]],
) -> None:
    """Check the hash of every data file if ``data.verify`` is "hashes"; all ranks must call this.

    Each rank hashes some of the files. All ranks synchronize after each gibibyte, because a wait
    for whole files could exceed the time limit of a collective. ``extend_limit`` returns a context
    with a longer watchdog limit.
    """
    if data.verify != "hashes":
        return
    parts = _hash(data, parallel_state.rank, parallel_state.world_size)
    pending = True
    while pending:
        with extend_limit():
            with errors_on_all_ranks():
                ended = next(parts, "ended") == "ended"
            flag = torch.tensor([not ended], dtype=torch.int32, device=parallel_state.device)
            distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        pending = bool(flag)


def _hash(data: DataConfig, rank: int, ranks: int) -> Iterator[None]:
    """Check the data files ``rank``, ``rank + ranks``, and so on; yield after each gibibyte."""
    files = [
        (source.path, suffix)
        for source in data.sources
        for suffix in data_files(read_corpus_manifest(source.path))
    ]
    # Index files are small; put them last, so that the large files are spread evenly.
    files.sort(key=lambda file: file[1] == ".idx")
    for path, suffix in files[rank::ranks]:
        yield from check_hash(path, suffix)


def open_loader(
    recipe: Recipe,
    parallel_state: ParallelState,
    split: Split,
    state: Mapping[str, Any] | None = None,
) -> Loader:
    """Return a loader that reads this data-parallel rank's microbatches from a split.

    Args:
        state: saved state of a loader to resume from; None to begin with the first sample.
    """
    training = recipe.training
    samples = open_samples(recipe.data, training.seq_length, training.seed, split)
    if state is not None:
        samples = samples.resumed(state)
    if split == "train":
        samples.require(training.total_steps * training.global_batch_size)
    return Loader(
        samples,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        data_parallel_rank=parallel_state.data_rank,
        data_parallel_size=parallel_state.data_size,
        consumed_samples=int(state["consumed_samples"]) if state else 0,
    )


def on_this_rank(microbatches: Sequence[Batch], parallel_state: ParallelState) -> list[Batch]:
    """Shard the sequences of microbatches for context parallelism, and move them to the device.

    The boundaries of documents stay unsharded and on the CPU, where attention reads them.
    """
    rank, size = parallel_state.context_rank, parallel_state.context_size
    moved = []
    for batch in microbatches:
        tensors: dict[str, Tensor] = {name: getattr(batch, name) for name in _BY_TOKEN}
        if size > 1:
            tensors = {name: shard_sequence(x, 1, rank, size) for name, x in tensors.items()}
        if batch.sources is not None:
            tensors["sources"] = batch.sources
        on_device = {
            name: x.to(parallel_state.device, non_blocking=True) for name, x in tensors.items()
        }
        moved.append(replace(batch, **on_device))
    return moved
