"""This rank's microbatches: opened from the recipe, moved to the device."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

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


def on_device(microbatches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """The microbatches with their tensors on the device; the kernels read documents on the CPU."""
    return [
        replace(
            batch,
            **{
                field.name: value.to(device, non_blocking=True)
                for field in fields(batch)
                if field.name != "document_ids"
                and (value := getattr(batch, field.name)) is not None
            },
        )
        for batch in microbatches
    ]
