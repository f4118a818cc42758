"""This rank's microbatches: opened from the recipe, moved to the device."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from diffmegatron.attention.context.zigzag import shard_sequence
from diffmegatron.config.schema import Recipe
from diffmegatron.data.documents import Split
from diffmegatron.data.loader import Batch, Loader
from diffmegatron.data.samples import open_samples
from diffmegatron.parallel.topology import Topology


def open_loader(
    recipe: Recipe, topology: Topology, split: Split, state: Mapping[str, Any] | None = None
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
        data_parallel_rank=topology.data_rank,
        data_parallel_size=topology.data_size,
        consumed_samples=int(state["consumed_samples"]) if state else 0,
    )


def on_this_rank(microbatches: Sequence[Batch], topology: Topology) -> list[Batch]:
    """This rank's part of the microbatches, on its device.

    Context-parallel ranks hold the zigzag parts of each sequence; documents stay whole and on the
    CPU, where the kernels read them.
    """
    return [
        replace(
            batch,
            **{
                field.name: _part(value, topology).to(topology.device, non_blocking=True)
                for field in fields(batch)
                if field.name != "document_ids"
                and (value := getattr(batch, field.name)) is not None
            },
        )
        for batch in microbatches
    ]


def _part(whole: Tensor, topology: Topology) -> Tensor:
    if topology.context_size == 1:
        return whole
    return shard_sequence(whole, 1, topology.context_rank, topology.context_size)
