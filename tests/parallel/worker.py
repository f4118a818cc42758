"""Ranks that train a tiny recipe under a layout.

Started through :mod:`tests.ranks` by :mod:`tests.parallel.matrix`, with the arguments
``RECIPE OUT NAME override ...``; the run goes to OUT/NAME, and the hash of its gathered initial
weights to OUT/NAME/initial.txt.
"""

import hashlib
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import distributed

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training import run
from diffmegatron.training.trainer import train


def train_hashing(recipe: Recipe) -> str:
    """Train, and hash the whole network's initial weights, gathered by name from all ranks."""
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


def main() -> None:
    """Run the layout named on the command line."""
    recipe_file, out, name, *overrides = sys.argv[1:]
    recipe = load_recipe(recipe_file, [*overrides, f"run_dir={out}/{name}"])
    digest = train_hashing(recipe)
    (Path(out) / name / "initial.txt").write_text(digest)
