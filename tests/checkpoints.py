"""Small real checkpoints for tests of code that reads checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffmegatron.checkpoint.checkpoint_format import Position, finish_checkpoint, rank_file
from diffmegatron.checkpoint.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
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
    """Write a checkpoint of two ranks and return its folder.

    Each rank has half of a matrix. Rank 1 also has a norm weight.
    """
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
    finish_checkpoint(
        store, Position(step, step, data_state(8 * step), GUARD), load_recipe(file), entries
    )
    return store.path(step)


def data_state(consumed_samples: int) -> dict[str, Any]:
    """Return the state of a loader with two sources."""
    sources = [{"path": name, "content": name, "weight": 0.5} for name in ("corpus", "other")]
    mixture = [{"from_sample": 0, "sources": sources[:1]}, {"from_sample": 8, "sources": sources}]
    return {
        "consumed_samples": consumed_samples,
        "settings": {"seed": 1234},
        "mixture": mixture if consumed_samples > 8 else mixture[:1],
    }


def norm() -> Shard:
    """Return the norm weight of rank 1, stored after the 12 elements of its half of the matrix."""
    return Shard(NAMES[1], (4,), (0,), (4,), 12, True)


def sign(directory: Path) -> None:
    """Write a manifest with the current checksums, so that damaged files pass verification."""
    step = json.loads((directory / MANIFEST).read_text())["step"]
    files = sorted(path for path in directory.iterdir() if path.name != MANIFEST)
    write_manifest(
        directory, CheckpointManifest(step, tuple(describe_file(path) for path in files))
    )


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Apply ``change``, which works in place, to the content of a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def change_header(path: Path, change: Callable[[dict[str, Any], list], object]) -> None:
    """Apply ``change``, which works in place, to a rank file's header and list of tensor pieces."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    pieces = json.loads(header["__metadata__"]["pieces"])
    change(header, pieces)
    header["__metadata__"]["pieces"] = json.dumps(pieces)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
