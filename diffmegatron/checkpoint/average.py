"""The mean of the weights of a run's last checkpoints, as a checkpoint that others start from."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_format import (
    WEIGHT,
    Checkpoint,
    Position,
    open_checkpoint,
)
from diffmegatron.checkpoint.checkpoint_store import CHECKPOINTS
from diffmegatron.checkpoint.stage_folders import last_stage
from diffmegatron.checkpoint.weights import write_checkpoint
from diffmegatron.config.stage_order import model_keys
from diffmegatron.errors import UserError
from diffmegatron.files import shown


def average_checkpoints(run_dir: Path, last: int, out: Path) -> Path:
    """Write the mean of the newest checkpoints of a run, with the position of the newest.

    The float32 master weights are added in float64, one tensor at a time.

    Args:
        run_dir: of the run; of one with stages the last is taken.
        last: how many checkpoints.
        out: the folder whose ``checkpoints`` get the new one; it must have none.

    Returns:
        The checkpoint's directory. It has weights alone: no run goes on from it.

    Raises:
        UserError: there are too few checkpoints, one is damaged or of another network, or ``out``
            cannot be used.
    """
    if (out / CHECKPOINTS).exists():
        raise UserError(f"{shown(out)} has checkpoints already; give a folder without any")
    store = last_stage(run_dir).store
    steps = store.complete()
    if len(steps) < last:
        raise UserError(
            f"{shown(run_dir)} has {len(steps)} complete checkpoints and the mean is asked of the "
            f"last {last}; give --last {max(1, len(steps))} at most"
        )
    opened = [open_checkpoint(store.path(step)) for step in steps[-last:]]
    _check_one_network(opened)
    newest = opened[-1]
    keys = ("step", "updates", "data", "guard")
    position = Position(**{key: newest.state[key] for key in keys})
    return write_checkpoint(_means(opened), newest.recipe, out, position=position)


def _check_one_network(checkpoints: Sequence[Checkpoint]) -> None:
    *others, newest = checkpoints
    now = model_keys(newest.recipe.model, newest.recipe.model.attention)
    for other in others:
        before = model_keys(other.recipe.model, other.recipe.model.attention)
        for key in [*now, *before]:
            if before.get(key) != now.get(key):
                raise UserError(
                    f"{shown(other.directory)} has {key} {before.get(key)!r} and "
                    f"{shown(newest.directory)} {now.get(key)!r}; give a --last that takes "
                    "checkpoints of one network"
                )


def _means(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoints[-1].tensors.names():
        total = torch.zeros(checkpoints[-1].tensors.shape(name), dtype=torch.float64)
        for checkpoint in checkpoints:
            total += checkpoint.tensors.whole(WEIGHT, name)
        yield name, total / len(checkpoints)
