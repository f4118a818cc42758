"""Ranks that train a tiny recipe under a layout.

:mod:`tests.parallel.matrix` starts the ranks through :mod:`tests.ranks`. The arguments are
``RECIPE OUT NAME override ...``. Outputs:

- ``OUT/NAME``: the run.
- ``OUT/NAME/initial.txt``: the hash of the gathered initial weights.
- ``OUT/NAME/reductions.json``: the result of :mod:`tests.parallel.reductions` on the first batches,
  if the layout sums gradients during the backward pass.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import distributed

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training import run, trainer
from diffmegatron.training.trainer import train
from tests.parallel.reductions import STEPS, compare


def train_hashing(recipe: Recipe) -> str:
    """Train, and return the hash of the network's initial weights, gathered from all ranks."""
    digests = []

    def build(recipe: Recipe, parallel_state: ParallelState) -> torch.nn.Module:
        network = build_model(recipe, parallel_state)
        digests.append(_hash(network, parallel_state))
        return network

    with mock.patch.object(run, "build_model", build):
        train(recipe)
    return digests[0]


def _hash(network: torch.nn.Module, parallel_state: ParallelState) -> str:
    boxes = [
        (shard.name, shard.global_shape, shard.box, shard.view(parameter.data).clone())
        for parameter, shards in parameter_shards(network).items()
        for shard in shards
    ]
    gathered: list[list] = [[] for _ in range(parallel_state.world_size)]
    distributed.all_gather_object(gathered, boxes)
    whole: dict[str, torch.Tensor] = {}
    for name, shape, box, values in (box for boxes in gathered for box in boxes):
        whole.setdefault(name, torch.full(shape, torch.nan))[box] = values.float()
    digest = hashlib.sha256()
    for name in sorted(whole):
        assert not whole[name].isnan().any(), name
        digest.update(name.encode() + whole[name].numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def recorded() -> Iterator[list[list[Batch]]]:
    """Yield a list to which the first ``STEPS`` steps append this rank's microbatches."""
    steps: list[list[Batch]] = []
    forward_backward = trainer.forward_backward

    def record(engine, microbatches, *args, **kwargs):
        if len(steps) < STEPS:
            steps.append(list(microbatches))
        return forward_backward(engine, microbatches, *args, **kwargs)

    with mock.patch.object(trainer, "forward_backward", record):
        yield steps


def main() -> None:
    """Run the layout named on the command line."""
    recipe_file, out, name, *overrides = sys.argv[1:]
    recipe = load_recipe(recipe_file, [*overrides, f"run_dir={out}/{name}"])
    folder = Path(out) / name
    distributed.init_process_group("gloo")
    with recorded() as batches:
        digest = train_hashing(recipe)
    (folder / "initial.txt").write_text(digest)
    shards = recipe.data_parallel(distributed.get_world_size()) * recipe.parallel.context
    if recipe.parallel.overlaps_gradients and shards > 1:
        found = compare(recipe, batches)
        if distributed.get_rank() == 0:
            (folder / "reductions.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
