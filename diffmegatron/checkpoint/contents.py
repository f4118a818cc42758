"""What a checkpoint of a run contains, for whoever reads it: training, export, evaluation.

``rank_XXXXX.safetensors`` holds what each rank owned of the float32 master weights and Adam's
moments, and its random states; ``state.json`` the position in the run and in the data;
``recipe.yaml`` the resolved recipe. None of it but the random states depends on the layout.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from diffmegatron.checkpoint.manifest import read_manifest, verify_files
from diffmegatron.checkpoint.sharded import ShardedReader
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError

RECIPE = "recipe.yaml"
STATE = "state.json"
WEIGHT = "weight"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: nothing of the tensors is read before it is asked for."""

    directory: Path
    recipe: Recipe
    state: dict[str, Any]
    tensors: ShardedReader

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole network, tensor by tensor: name and float32 value."""
        for name in self.tensors.names():
            yield name, self.tensors.whole(WEIGHT, name)


def rank_file(rank: int) -> str:
    """The file a rank writes."""
    return f"rank_{rank:05d}.safetensors"


def open_checkpoint(directory: Path) -> Checkpoint:
    """Open a checkpoint.

    Raises:
        UserError: the directory is no checkpoint, is incomplete, or a file is damaged.
    """
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    files = [entry.name for entry in manifest.files if entry.name.endswith(".safetensors")]
    try:
        state = json.loads((directory / STATE).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / STATE} is damaged: {error}") from None
    reader = ShardedReader(directory / name for name in files)
    return Checkpoint(directory, load_recipe(directory / RECIPE), state, reader)


def check_same_run(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Refuse to go on from a checkpoint with a recipe that would be another run.

    The network, the tokenizer and what orders the samples must be the same; layout, precision,
    learning rate, length and the mixture's weights may change (the data room records the latter).

    Raises:
        UserError: the first key that differs, with both values.
    """
    saved, asked = checkpoint.recipe.model_dump(), recipe.model_dump()
    keys = [("model", key) for key in asked["model"]]
    keys += [("training", key) for key in ("seq_length", "global_batch_size", "seed")]
    keys += [("data", "tokenizer")]
    for section, key in keys:
        before, now = saved[section][key], asked[section][key]
        if before != now:
            raise UserError(
                f"{checkpoint.directory} was trained with {section}.{key} {before!r} and the "
                f"recipe says {now!r}; give the former, or another run_dir to start a new run"
            )
