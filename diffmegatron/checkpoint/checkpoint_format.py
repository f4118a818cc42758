"""What a checkpoint of a run contains, for whoever reads it: training, export, evaluation.

``rank_XXXXX.safetensors`` holds what each rank owned of the float32 master weights and Adam's
moments, and its random states; ``state.json`` the position in the run and in the data;
``recipe.yaml`` the resolved recipe. None of it but the random states depends on the layout.

A checkpoint of weights alone, such as an imported model's, is one that runs start from and none
goes on from; its files are as many as hold the weights in pieces of bounded size.

How tensors are cut into pieces is in ``sharded.py``, the bytes of a file in ``writing.py``, and the
list of files with their checksums in ``checkpoint_manifest.py``.
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
# The recipe's list of sources and the state's window of the guard are as long as the user wants.
_MAX_BYTES = {RECIPE: 1 << 24, STATE: MAX_BYTES}

_LIBRARIES = ("torch", "megatron-core", "deepspeed")
_ORDER_OF_SAMPLES = ("seq_length", "global_batch_size", "seed")

# Weights with optimizer and random states, or weights alone.
Contents = Literal["run", "weights"]
_Steps = Annotated[int, Field(ge=0, le=MAX_STEP)]


class _State(BaseModel):
    """``state.json``; what is in ``data`` and ``guard`` the loader and the guard know."""

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
    """Where a run is, the same on every rank.

    Attributes:
        step: steps done, the skipped ones too.
        updates: updates applied, as Adam counts them.
        data: the loader's state; None at the beginning.
        guard: the guard's state; None at the beginning.
    """

    step: int
    updates: int
    data: dict[str, Any] | None
    guard: dict[str, Any] | None


BEGINNING = Position(0, 0, None, None)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, found good; its tensors are read when they are asked for."""

    directory: Path
    manifest: Manifest
    recipe: Recipe
    state: dict[str, Any]
    tensors: ShardedReader

    @property
    def is_weights_only(self) -> bool:
        """Whether no run can go on from it, since there is no optimizer state."""
        return self.state["contents"] == "weights"

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole network, tensor by tensor: name and float32 value."""
        for name in self.tensors.names():
            yield name, self.tensors.whole(WEIGHT, name)

    def fingerprint(self) -> str:
        """Tells models of one shape apart: a hash of the first row of every layer's linear_qkv.

        The same whatever layout and precision wrote the checkpoint.
        """
        digest = hashlib.sha256()
        for layer in range(self.recipe.model.num_layers):
            name = f"decoder.layers.{layer}.self_attention.linear_qkv.weight"
            row = self.tensors.box(WEIGHT, name, (0, 0), (1, self.recipe.model.hidden_size))
            digest.update(row.numpy().tobytes())
        return digest.hexdigest()[:16]


def rank_file(rank: int) -> str:
    """The file a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def open_checkpoint(directory: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint:
    """Open a checkpoint and verify it: the one way to what is in it.

    Every file is an ordinary one that the manifest lists with its size, none is missing or more.
    The position and the recipe are what they should be, byte by byte. The pieces in the ranks'
    files are whole tensors of float32, by their headers. And the content of those files, which
    takes the time, has the manifest's checksums and finite numbers only.

    Args:
        directory: of the checkpoint.
        share: (i, n): of the ranks' files read the content of every n-th from the i-th on, where n
            processes open the checkpoint together and compare what they found.

    Raises:
        UserError: the directory is no checkpoint, or is damaged.
    """
    manifest = read_manifest(directory)
    entries = {entry.name: entry for entry in manifest.files}
    position = _read_small(directory, STATE, entries)
    state: _State = parse_json(position, _State, shown(directory / STATE))
    if state.step != manifest.step:
        raise UserError(
            f"{shown(directory / STATE)} is of step {state.step} and the checkpoint's manifest of "
            f"step {manifest.step}"
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
    """The recipe of a checkpoint, of which nothing else is read but the manifest.

    Raises:
        UserError: the directory is no checkpoint, or one of the two files is damaged.
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
    """In one process, when all have written: the small files, the manifest, the new name."""
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
    """The names of the ranks' files, which with the two small ones are all that is listed."""
    files = sorted(entries.keys() - {STATE, RECIPE})
    if len(files) != world_size or files != [rank_file(rank) for rank in range(world_size)]:
        raise UserError(
            f"{shown(directory)} was written by {world_size} ranks and its manifest lists "
            f"{len(files)} files beside {STATE} and {RECIPE}, which are not theirs"
        )
    return files


def _patterns(recipe: Recipe) -> list[str] | None:
    patterns = recipe.optimizer.trainable
    return None if patterns is None else list(patterns)


def check_same_run(directory: Path, saved_recipe: Recipe, recipe: Recipe) -> None:
    """Refuse to go on from a checkpoint with a recipe that would be another run.

    Args:
        directory: of the checkpoint.
        saved_recipe: that it was saved with.
        recipe: of the run that would go on.

    The network, the tokenizer, what orders the samples and what is trained must be the same;
    layout, precision, learning rate, length and the mixture's weights may change (`data` records
    the latter).

    Raises:
        UserError: the first key that differs, with both values.
    """
    saved, asked = (
        model_keys(each.model, each.model.attention)
        | {f"training.{key}": getattr(each.training, key) for key in _ORDER_OF_SAMPLES}
        | {"data.tokenizer": each.data.tokenizer}
        | {"optimizer.trainable": _patterns(each)}
        for each in (saved_recipe, recipe)
    )
    for key, now in asked.items():
        before = saved.get(key)
        if before != now:
            raise UserError(
                f"{directory} was trained with {key} {before!r} and the recipe says "
                f"{now!r}; give the former, or another run_dir to start a new run"
            )
