"""The format of a checkpoint, which is a directory with several files.

- ``rank_XXXXX.safetensors``: one rank's shard of the float32 master weights and of Adam's moments
  (or Muon's momentum), and the rank's random states (`sharded.py`, `tensor_file.py`);
- ``state.json``: the progress of the run (`state_file.py`), and the versions of libraries;
- ``recipe.yaml``: the resolved recipe;
- ``manifest.json``: sizes and checksums of the other files (`checkpoint_manifest.py`).

A run with another parallel layout can read everything except the random states. A run can start
from a checkpoint with only weights (e.g. of an imported model), but cannot resume from it.
"""

import hashlib
import json
import platform
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from diffmegatron import __version__
from diffmegatron.checkpoint.checkpoint_manifest import (
    CheckpointManifest,
    FileEntry,
    describe_file,
    read_checkpoint_manifest,
    write_manifest,
)
from diffmegatron.checkpoint.checkpoint_store import RECIPE, CheckpointStore
from diffmegatron.checkpoint.sharded import WEIGHT, ShardedReader
from diffmegatron.checkpoint.state_file import Contents, State
from diffmegatron.config.load import dump_recipe, load_resolved
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import is_same_tokenizer, model_keys
from diffmegatron.errors import UserError
from diffmegatron.files import MAX_BYTES, format_path, parse_json, read_bytes

STATE = "state.json"
# Largest accepted file sizes in bytes.
_MAX_BYTES = {RECIPE: 1 << 24, STATE: MAX_BYTES}

_LIBRARIES = ("torch", "megatron-core", "deepspeed")
_SAMPLE_ORDER_KEYS = ("seq_length", "global_batch_size", "seed")


@dataclass(frozen=True)
class Position:
    """The progress of a run, which is equal on every rank.

    Attributes:
        step: number of steps done, including those that the guard against loss spikes skipped.
        updates: number of applied optimizer updates, which is Adam's step count.
        data: state of the data loader; None at the beginning.
        guard: state of the guard against loss spikes; None at the beginning.
    """

    step: int
    updates: int
    data: dict[str, Any] | None
    guard: dict[str, Any] | None


BEGINNING = Position(0, 0, None, None)


@dataclass(frozen=True)
class Checkpoint:
    """An opened and verified checkpoint; ``state`` is the content of ``state.json``."""

    directory: Path
    manifest: CheckpointManifest
    recipe: Recipe
    state: dict[str, Any]
    tensors: ShardedReader

    @property
    def is_weights_only(self) -> bool:
        """True if the checkpoint has no optimizer state, so no run can resume from it."""
        return self.state["contents"] == "weights"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and float32 value of every weight of the network."""
        for name in self.tensors.names():
            yield name, self.tensors.read_tensor(WEIGHT, name)

    def fingerprint(self) -> str:
        """Return a hash (16 hex digits) of the first row of each layer's ``linear_qkv`` weight."""
        digest = hashlib.sha256()
        for layer in range(self.recipe.model.num_layers):
            name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
            row = self.tensors.read_box(WEIGHT, name, (0, 0), (1, self.recipe.model.hidden_size))
            digest.update(row.numpy().tobytes())
        return digest.hexdigest()[:16]


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def open_checkpoint(directory: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Open a checkpoint; read every byte to verify checksums and that all numbers are finite.

    Args:
        share: (i, n) for process i of n processes that open the checkpoint together. Process i
            verifies the content of the rank files i, i + n, i + 2n and so on. If such a file is
            damaged, only process i raises an error.
    """
    manifest = read_checkpoint_manifest(directory)
    entries = {entry.name: entry for entry in manifest.files}
    position = _read_small(directory, STATE, entries)
    state: State = parse_json(position, State, format_path(directory / STATE))
    if state.step != manifest.step:
        raise UserError(
            f"{format_path(directory / STATE)} is of step {state.step} and the checkpoint's "
            f"manifest of step {manifest.step}; use another checkpoint"
        )
    _read_small(directory, RECIPE, entries)
    recipe = load_resolved(directory / RECIPE, directory.resolve().parent.parent)
    state.check_samples(recipe.training.global_batch_size, format_path(directory / STATE))
    files = _rank_files(directory, state.world_size, entries)
    reader = ShardedReader(directory, files)
    index, of = share
    for name in files[index::of]:
        reader.files[name].check_content(entries[name])
    return Checkpoint(directory, manifest, recipe, state.model_dump(), reader)


def read_recipe(directory: Path) -> Recipe:
    """Read the recipe of a checkpoint, without reading the tensors and the state."""
    _read_small(
        directory, RECIPE, {each.name: each for each in read_checkpoint_manifest(directory).files}
    )
    return load_resolved(directory / RECIPE, directory.resolve().parent.parent)


def finish_checkpoint(
    store: CheckpointStore,
    position: Position,
    recipe: Recipe,
    entries: list[FileEntry],
    contents: Contents = "run",
) -> None:
    """Write state, recipe and manifest beside the rank files; give the directory its final name.

    ``entries`` are the manifest entries of the rank files.
    """
    directory = store.unfinished_path(position.step)
    state = asdict(position) | {
        "world_size": len(entries),
        "versions": _versions(),
        "contents": contents,
    }
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n")
    (directory / RECIPE).write_text(dump_recipe(recipe))
    described = [describe_file(directory / name) for name in (STATE, RECIPE)]
    write_manifest(directory, CheckpointManifest(position.step, (*entries, *described)))
    store.commit(position.step)


@cache  # Each look-up parses a library's metadata, which takes longer than the save of a small run.
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES} | {
        "diffmegatron": __version__,
        "python": platform.python_version(),
    }


def _read_small(directory: Path, name: str, entries: dict[str, FileEntry]) -> bytes:
    path = directory / name
    if name not in entries:
        raise UserError(f"the manifest of {format_path(directory)} does not list {name}")
    content = read_bytes(path, max_bytes=_MAX_BYTES[name])
    if zlib.crc32(content) != entries[name].crc32:
        raise UserError(f"{format_path(path)} is damaged: its checksum differs from the manifest's")
    return content


def _rank_files(directory: Path, world_size: int, entries: dict[str, FileEntry]) -> list[str]:
    files = sorted(entries.keys() - {STATE, RECIPE})
    if len(files) != world_size or files != [rank_file(rank) for rank in range(world_size)]:
        raise UserError(
            f"{format_path(directory)} was written by {world_size} ranks and its manifest lists "
            f"{len(files)} files beside {STATE} and {RECIPE}; it must list one file of each rank"
        )
    return files


def check_same_run(directory: Path, saved_recipe: Recipe, recipe: Recipe) -> None:
    """Check that a run with ``recipe`` may resume from a checkpoint with ``saved_recipe``.

    These settings must be equal: the section ``model``, ``data.tokenizer``,
    ``optimizer.trainable``, and ``seq_length``, ``global_batch_size`` and ``seed`` of ``training``.
    A run of Muon cannot continue with AdamW, because it has not saved second moments of matrices.
    """
    saved, wanted = (
        model_keys(each.model, each.model.attention)
        | {f"training.{key}": getattr(each.training, key) for key in _SAMPLE_ORDER_KEYS}
        | {"data.tokenizer": each.data.tokenizer}
        | {"optimizer.trainable": each.optimizer.model_dump(mode="json")["trainable"]}
        for each in (saved_recipe, recipe)
    )
    for key, now in wanted.items():
        before = saved.get(key)
        is_moved = key == "data.tokenizer" and is_same_tokenizer(str(before), str(now))
        if before != now and not is_moved:
            raise UserError(
                f"{directory} was trained with {key} {before!r} and the recipe has {now!r}; "
                "restore the former, or give another run_dir to start a new run"
            )
    if (saved_recipe.optimizer.kind, recipe.optimizer.kind) == ("muon", "adamw"):
        raise UserError(
            f"{directory} was trained with optimizer.kind 'muon' and has no second moments of its "
            "matrices, which 'adamw' needs; restore 'muon', or start a new run from it with "
            "checkpoint.start_from"
        )
