"""The format of a checkpoint, which training, export and evaluation read through this module.

``rank_XXXXX.safetensors`` holds one rank's share of the float32 master weights and Adam's moments,
and its random states. ``state.json`` holds the position in the run and in the data, and
``recipe.yaml`` the resolved recipe. Only the random states depend on the layout.

A checkpoint may hold only weights, for example of an imported model. A run can start from it but
not resume from it. Its weights are split into as many files as the maximum file size requires.

``sharded.py`` splits tensors into pieces, ``writing.py`` writes the bytes of a file, and
``checkpoint_manifest.py`` lists the files with their checksums.
"""

import hashlib
import json
import platform
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from diffmegatron import __version__
from diffmegatron.checkpoint.checkpoint_manifest import (
    MAX_STEP,
    FileEntry,
    Manifest,
    describe_file,
    read_manifest,
    write_manifest,
)
from diffmegatron.checkpoint.checkpoint_store import RECIPE, CheckpointStore
from diffmegatron.checkpoint.sharded import WEIGHT, ShardedReader
from diffmegatron.config.load import dump_recipe, load_resolved
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import model_keys
from diffmegatron.errors import UserError
from diffmegatron.files import MAX_BYTES, parse_json, read_bytes, shown

STATE = "state.json"
# The user decides how long the recipe's list of sources and the guard's window in the state are.
_MAX_BYTES = {RECIPE: 1 << 24, STATE: MAX_BYTES}

_LIBRARIES = ("torch", "megatron-core", "deepspeed")
_SAMPLE_ORDER_KEYS = ("seq_length", "global_batch_size", "seed")

Contents = Literal["run", "weights"]
"""``run``: weights with optimizer and random states. ``weights``: only weights."""
_Steps = Annotated[int, Field(ge=0, le=MAX_STEP)]


class _State(BaseModel):
    """The content of ``state.json``. The loader and the guard define ``data`` and ``guard``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    step: _Steps
    updates: _Steps
    data: dict[str, Any] | None
    guard: dict[str, Any] | None
    world_size: Annotated[int, Field(ge=1)]
    versions: dict[str, str]
    contents: Contents = "run"


@dataclass(frozen=True)
class Position:
    """The position of a run, equal on every rank.

    Attributes:
        step: number of steps done, including skipped ones.
        updates: number of updates applied, which Adam counts.
        data: state of the loader; None at the beginning.
        guard: state of the guard; None at the beginning.
    """

    step: int
    updates: int
    data: dict[str, Any] | None
    guard: dict[str, Any] | None


BEGINNING = Position(0, 0, None, None)


@dataclass(frozen=True)
class Checkpoint:
    """An opened and verified checkpoint. Tensors are read on demand."""

    directory: Path
    manifest: Manifest
    recipe: Recipe
    state: dict[str, Any]
    tensors: ShardedReader

    @property
    def is_weights_only(self) -> bool:
        """True if the optimizer state is missing, so that no run can resume from it."""
        return self.state["contents"] == "weights"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and float32 value of every weight of the network."""
        for name in self.tensors.names():
            yield name, self.tensors.whole(WEIGHT, name)

    def fingerprint(self) -> str:
        """Return a hash that distinguishes models of one shape.

        It covers the first row of every layer's linear_qkv, and does not depend on the layout and
        precision of the run that wrote the checkpoint.
        """
        digest = hashlib.sha256()
        for layer in range(self.recipe.model.num_layers):
            name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
            row = self.tensors.box(WEIGHT, name, (0, 0), (1, self.recipe.model.hidden_size))
            digest.update(row.numpy().tobytes())
        return digest.hexdigest()[:16]


def rank_file(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def open_checkpoint(directory: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Open and verify a checkpoint. Every reader of a checkpoint uses this function.

    Four things are checked. The files and their sizes match the manifest. The state and the recipe
    match their checksums and are valid. The headers of the ranks' files describe pieces that form
    whole float32 tensors. The content of the ranks' files matches its checksums and has only finite
    numbers; this check reads every byte.

    Args:
        directory: directory of the checkpoint.
        share: (i, n): check the content of every n-th file from the i-th on, if n processes open
            the checkpoint together and combine their results.

    Raises:
        UserError: the directory is not a checkpoint, or is damaged.
    """
    manifest = read_manifest(directory)
    entries = {entry.name: entry for entry in manifest.files}
    position = _read_small(directory, STATE, entries)
    state: _State = parse_json(position, _State, shown(directory / STATE))
    if state.step != manifest.step:
        raise UserError(
            f"{shown(directory / STATE)} is of step {state.step} and the checkpoint's manifest of "
            f"step {manifest.step}; use another checkpoint"
        )
    _read_small(directory, RECIPE, entries)
    recipe = load_resolved(directory / RECIPE)
    files = _rank_files(directory, state.world_size, entries)
    reader = ShardedReader(directory, files)
    index, of = share
    for name in files[index::of]:
        reader.check_content(entries[name])
    return Checkpoint(directory, manifest, recipe, state.model_dump(), reader)


def read_recipe(directory: Path) -> Recipe:
    """Read the recipe of a checkpoint. Of the other files only the manifest is read.

    Raises:
        UserError: the directory is not a checkpoint, or one of the two files is damaged.
    """
    _read_small(directory, RECIPE, {each.name: each for each in read_manifest(directory).files})
    return load_resolved(directory / RECIPE)


def finish_checkpoint(
    store: CheckpointStore,
    position: Position,
    recipe: Recipe,
    entries: list[FileEntry],
    contents: Contents = "run",
) -> None:
    """Write the small files and the manifest of a checkpoint, then rename it to its final name.

    One process calls this after all ranks have written their files.
    """
    directory = store.unfinished_path(position.step)
    state = asdict(position) | {
        "world_size": len(entries),
        "versions": {name: version(name) for name in _LIBRARIES}
        | {"diffmegatron": __version__, "python": platform.python_version()},
        "contents": contents,
    }
    (directory / STATE).write_text(json.dumps(state, indent=1) + "\n")
    (directory / RECIPE).write_text(dump_recipe(recipe))
    described = [describe_file(directory / name) for name in (STATE, RECIPE)]
    write_manifest(directory, Manifest(position.step, (*entries, *described)))
    store.commit(position.step)


def _read_small(directory: Path, name: str, entries: dict[str, FileEntry]) -> bytes:
    path = directory / name
    if name not in entries:
        raise UserError(f"the manifest of {shown(directory)} does not list {name}")
    content = read_bytes(path, max_bytes=_MAX_BYTES[name])
    if zlib.crc32(content) != entries[name].crc32:
        raise UserError(f"{shown(path)} is damaged: its checksum is not the manifest's")
    return content


def _rank_files(directory: Path, world_size: int, entries: dict[str, FileEntry]) -> list[str]:
    """Return the names of the ranks' files, after a check that no other file is listed."""
    files = sorted(entries.keys() - {STATE, RECIPE})
    if len(files) != world_size or files != [rank_file(rank) for rank in range(world_size)]:
        raise UserError(
            f"{shown(directory)} was written by {world_size} ranks and its manifest lists "
            f"{len(files)} files beside {STATE} and {RECIPE}; it must list one file of each rank"
        )
    return files


def _patterns(recipe: Recipe) -> list[str] | None:
    patterns = recipe.optimizer.trainable
    return None if patterns is None else list(patterns)


def check_same_run(directory: Path, saved_recipe: Recipe, recipe: Recipe) -> None:
    """Check that a run may resume from a checkpoint with a possibly edited recipe.

    The network, the tokenizer, the order of the samples and the trained parameters must be equal.
    Layout, precision, learning rate, number of steps and the mixture's weights may change; the
    state of the loader records the weights.

    Args:
        directory: directory of the checkpoint.
        saved_recipe: recipe of the checkpoint.
        recipe: recipe of the run that resumes.

    Raises:
        UserError: a key that must be equal differs.
    """
    saved, wanted = (
        model_keys(each.model, each.model.attention)
        | {f"training.{key}": getattr(each.training, key) for key in _SAMPLE_ORDER_KEYS}
        | {"data.tokenizer": each.data.tokenizer}
        | {"optimizer.trainable": _patterns(each)}
        for each in (saved_recipe, recipe)
    )
    for key, now in wanted.items():
        before = saved.get(key)
        if before != now:
            raise UserError(
                f"{directory} was trained with {key} {before!r} and the recipe has {now!r}; "
                "restore the former, or give another run_dir to start a new run"
            )
