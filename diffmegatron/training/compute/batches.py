"""This rank's microbatches: verify the sources, open the loader, move batches to the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.zigzag import shard_sequence
from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_manifest
from diffmegatron.data.index.verify_corpus import check_hash, data_files
from diffmegatron.data.loader import Batch, Loader
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.errors import UserError
from diffmegatron.parallel.parallel_state import ParallelState, fail_together

# Fields of a batch with one value per token, [b, s].
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def verify_sources(
    data: DataConfig,
    parallel_state: ParallelState,
    patience: Callable[[], AbstractContextManager[None]],
) -> None:
    """Hash every source file if ``data.verify`` is "hashes"; called on all ranks.

    The files are distributed over the ranks. The ranks synchronize after each gibibyte, so that
    none waits for a terabyte of another's longer than a collective may take.

    Args:
        data: the ``data`` section.
        parallel_state: layout of the ranks.
        patience: context manager that gives the watchdog time for one gibibyte.

    Raises:
        UserError: On all ranks, if a file is damaged.
    """
    if data.verify != "hashes":
        return
    parts = _hash(data, parallel_state.rank, parallel_state.world_size)
    pending = True
    while pending:
        problem = None
        with patience():
            try:
                ended = next(parts, "ended") == "ended"
            except UserError as error:
                ended, problem = True, str(error)
            fail_together(problem)
            flag = torch.tensor([not ended], dtype=torch.int32, device=parallel_state.device)
            distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        pending = bool(flag)


def _hash(data: DataConfig, rank: int, ranks: int) -> Iterator[None]:
    """Hash this rank's share of the files, the small index files last; yield after each part."""
    files = [
        (source.path, suffix)
        for source in data.sources
        for suffix in data_files(read_manifest(source.path))
    ]
    files.sort(key=lambda file: file[1] == ".idx")
    for path, suffix in files[rank::ranks]:
        yield from check_hash(path, suffix)


def open_loader(
    recipe: Recipe,
    parallel_state: ParallelState,
    split: Split,
    state: Mapping[str, Any] | None = None,
) -> Loader:
    """Open the batches of a split for this rank, from a loader's saved ``state`` if given.

    Raises:
        UserError: If the data cannot be opened, or the run needs more samples than a source has
            that must not repeat.
    """
    training = recipe.training
    samples = open_samples(recipe.data, training.seq_length, training.seed, split)
    if state is not None:
        samples = samples.resumed(state)
    if split == "train":
        samples.require(training.total_steps * training.global_batch_size)
    return Loader(
        samples,
        seq_length=training.seq_length,
        micro_batch_size=training.micro_batch_size,
        global_batch_size=training.global_batch_size,
        data_parallel_rank=parallel_state.data_rank,
        data_parallel_size=parallel_state.data_size,
        consumed_samples=int(state["consumed_samples"]) if state else 0,
    )


def on_this_rank(microbatches: Sequence[Batch], parallel_state: ParallelState) -> list[Batch]:
    """Return this rank's share of the microbatches on its device.

    Each context-parallel rank holds its zigzag shards of every sequence. Document boundaries stay
    whole and on the CPU, where the kernels' wrappers read them.
    """
    return [_on_this_rank(batch, parallel_state) for batch in microbatches]


def _on_this_rank(batch: Batch, parallel_state: ParallelState) -> Batch:
    parts = {name: _part(getattr(batch, name), parallel_state) for name in _BY_TOKEN}
    if batch.sources is not None:
        parts["sources"] = batch.sources
    device = parallel_state.device
    return replace(
        batch, **{name: part.to(device, non_blocking=True) for name, part in parts.items()}
    )


def _part(whole: Tensor, parallel_state: ParallelState) -> Tensor:
    if parallel_state.context_size == 1:
        return whole
    return shard_sequence(whole, 1, parallel_state.context_rank, parallel_state.context_size)
