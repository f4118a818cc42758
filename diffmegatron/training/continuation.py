"""A new run that starts with another's weights: the next stage of a training."""

from pathlib import Path

from diffmegatron.checkpoint.contents import WEIGHT, Checkpoint, open_checkpoint
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.training.resume import read_fragments
from diffmegatron.training.snapshot import ParameterShards

# What a stage may change of the network: the base of the rotary embedding has no weights.
_FREE = {"rope_theta", "initialization"}


def open_start(recipe: Recipe) -> Checkpoint | None:
    """The checkpoint whose weights a new run starts with, or None.

    Raises:
        UserError: ``checkpoint.start_from`` is no checkpoint and holds none, or its network or
            tokenizer is another.
    """
    if recipe.checkpoint.start_from is None:
        return None
    source = open_checkpoint(_resolve(Path(recipe.checkpoint.start_from)))
    before, now = source.recipe.model.model_dump(), recipe.model.model_dump()
    for key in now:
        if key in _FREE or before[key] == now[key]:
            continue
        raise UserError(
            f"{source.directory} has model.{key} {before[key]!r} and the recipe says {now[key]!r}; "
            "a run that starts from it must have the same network"
        )
    if source.recipe.data.tokenizer != recipe.data.tokenizer:
        raise UserError(
            f"{source.directory} was trained with data.tokenizer "
            f"{source.recipe.data.tokenizer!r} and the recipe says {recipe.data.tokenizer!r}; "
            "its embedding knows the former only"
        )
    return source


def load_weights(source: Checkpoint, engine: ZeroEngine, shards: ParameterShards) -> None:
    """Take over the weights and nothing else: Adam's moments and the data start anew."""
    read_fragments(source.tensors, (WEIGHT,), engine, shards)
    engine.restore(updates=0)


def _resolve(path: Path) -> Path:
    if not (path / "checkpoints").is_dir():
        return path
    latest = CheckpointStore(path).latest()
    if latest is None:
        raise UserError(f"checkpoint.start_from {path} has no whole checkpoint; train it first")
    return latest
