"""This rank's microbatches: opened from the recipe, moved to the device."""

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

# Of a batch, what has a value for each token, [b, s].
_BY_TOKEN = ("tokens", "labels", "loss_mask", "position_ids")


def verify_sources(
    data: DataConfig,
    parallel_state: ParallelState,
    patience: Callable[[], AbstractContextManager[None]],
) -> None:
    """Read every source in full and compare the hashes, where ``data.verify`` asks for it.

    Every rank calls it and takes files of its own. They meet after each gibibyte, so that no one
    waits for another's terabytes longer than a collective may take.

    Args:
        data: the ``data`` section.
        parallel_state: the ranks.
        patience: gives the time that one such part may take, as of the watchdog.

    Raises:
        UserError: on all ranks, if a file is damaged.
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
    """Check this rank's share of the files; the indexes, which are small, come last."""
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
    """The batches of a split for this rank, going on from a loader's ``state`` if given.

    Raises:
        UserError: the data cannot be opened, or the run is longer than a source that must not
            repeat.
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
    """This rank's part of the microbatches, on its device.

    Context-parallel ranks hold the zigzag parts of each sequence; documents stay whole and on the
    CPU, where the kernels read them.
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
