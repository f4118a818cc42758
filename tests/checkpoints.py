"""Small real checkpoints for the tests of whatever reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffmegatron.checkpoint.checkpoint_format import Position, finish_checkpoint, rank_file
from diffmegatron.checkpoint.checkpoint_manifest import (
    MANIFEST,
    Manifest,
    describe_file,
    write_manifest,
)
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.sharded import named_tensors, pieces_of, write_pieces
from diffmegatron.config.load import load_recipe
from diffmegatron.model.parameter_shards import Shard
from tests.conftest import TINY

NAMES = ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight")
GUARD = {"recent": {"loss": [2.0, 1.5]}, "in_a_row": 0, "skipped": 1, "spikes": 0, "rollbacks": 0}


def write_checkpoint(run_dir: Path, step: int) -> Path:
    """Write a checkpoint of two ranks, which share a tensor's rows; the second has a norm."""
    store = CheckpointStore(run_dir)
    directory = store.begin(step)
    matrix = Shard(NAMES[0], (6, 4), (0, 0), (3, 4), 0, True)
    owned = [[matrix], [Shard(NAMES[0], (6, 4), (3, 0), (3, 4), 0, True), norm()]]
    entries = []
    for rank, shards in enumerate(owned):
        numel = sum(shard.numel for shard in shards)
        values = {
            kind: torch.arange(numel) + scale * (rank + step)
            for kind, scale in {"weight": 10.0, "exp_avg": 0.1, "exp_avg_sq": 0.01}.items()
        }
        own = {"random.cpu": torch.full((16,), rank, dtype=torch.uint8)}
        described = named_tensors(pieces_of(shards, 0, values), own)
        entries.append(write_pieces(directory / rank_file(rank), *described))
    file = run_dir / "recipe.yaml"
    file.write_text(TINY.format(run_dir=run_dir, corpus="corpus"))
    data = {"consumed_samples": 8 * step, "settings": {}, "mixture": []}
    finish_checkpoint(store, Position(step, step, data, GUARD), load_recipe(file), entries)
    return store.path(step)


def norm() -> Shard:
    """Return rank 1's second tensor, after 12 elements of the first in its parameter."""
    return Shard(NAMES[1], (4,), (0,), (4,), 12, True)


def sign(directory: Path) -> None:
    """Give the files, whatever they are by now, the manifest that says so."""
    step = json.loads((directory / MANIFEST).read_text())["step"]
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    write_manifest(directory, Manifest(step, tuple(describe_file(path) for path in files)))


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Rewrite a JSON file with what a function does to its content."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_header(path: Path, change: Callable[[dict[str, Any], list], object]) -> None:
    """Rewrite a rank's file with what a function does to its header and its pieces."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    pieces = json.loads(header["__metadata__"]["pieces"])
    change(header, pieces)
    header["__metadata__"]["pieces"] = json.dumps(pieces)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
