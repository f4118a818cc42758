"""Ranks that measure a training step's memory under a layout.

:mod:`tests.parallel.test_memory` starts the ranks through :mod:`tests.ranks`. The arguments are
``OUT NAME``, where NAME is a key of :data:`tests.parallel.test_memory.LAYOUTS`. Every rank writes
three numbers to ``OUT/NAME.RANK.json``, each in bytes of this rank's tensors:

- ``held``: between two steps.
- ``backward``: peak in the forward and backward passes.
- ``update``: peak in the optimizer's update.
"""

import json
import sys
from pathlib import Path

import torch
from torch import distributed

from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.optim import zero
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.step import forward_backward
from tests.parallel.allocated import AllocatedTensors, living_storages
from tests.parallel.test_memory import BUCKET, make_recipe


def measure(recipe: Recipe) -> dict[str, int]:
    """Return ``held``, ``backward`` and ``update`` of step 2, when Adam's moments exist."""
    known = living_storages()
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = build_model(recipe, parallel_state)
        with ZeroEngine(network, recipe, parallel_state) as engine:
            batches = microbatches(recipe, parallel_state)
            forward_backward(engine, batches[: parallel_state.pipeline_size], parallel_state)
            engine.step(1e-3, allow=lambda _: True)
            with AllocatedTensors(known) as allocated:
                held = allocated.now
                forward_backward(engine, batches, parallel_state)
                backward = allocated.peak
                allocated.reset()
                engine.step(1e-3, allow=lambda _: True)
            return {"held": held, "backward": backward, "update": allocated.peak}


def microbatches(recipe: Recipe, parallel_state) -> list[Batch]:
    """Return this rank's microbatches of a step, all equal, with generated tokens."""
    training = recipe.training
    size, length = training.micro_batch_size, training.seq_length // parallel_state.context_size
    tokens = torch.arange(size * length).reshape(size, length) % 300
    batch = Batch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(size, length),
    )
    count = recipe.num_microbatches(parallel_state.world_size)
    return [batch] * count


def main() -> None:
    """Measure the layout named on the command line."""
    out, name = sys.argv[1:]
    config = zero.engine_config

    def with_small_bucket(recipe: Recipe) -> dict:
        values = config(recipe)
        values["zero_optimization"]["reduce_bucket_size"] = BUCKET
        return values

    zero.engine_config = with_small_bucket
    distributed.init_process_group("gloo")
    values = measure(make_recipe(name))
    Path(out, f"{name}.{distributed.get_rank()}.json").write_text(json.dumps(values))
    distributed.destroy_process_group()
