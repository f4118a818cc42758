"""Write the mean weights of a run's newest checkpoints as a checkpoint that holds only weights."""

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
from diffmegatron.files import format_path


def average_checkpoints(run_dir: Path, last: int, out: Path) -> Path:
    """Write the mean weights of the ``last`` newest checkpoints; return the new checkpoint's path.

    The result has only weights. Its step and data position are those of the newest checkpoint. In a
    run with stages, the checkpoints of the last stage are averaged. Sums are float64.

    Args:
        out: folder in which ``checkpoints`` is created; it must not contain checkpoints yet.
    """
    if (out / CHECKPOINTS).exists():
        raise UserError(
            f"{format_path(out)} has checkpoints already; give a folder without checkpoints"
        )
    store = last_stage(run_dir).store
    steps = store.complete()
    if len(steps) < last:
        raise UserError(
            f"--last is {last} and {format_path(run_dir)} has {len(steps)} complete checkpoints; "
            f"give --last {max(1, len(steps))} at most"
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
                    f"{format_path(other.directory)} has {key} {before.get(key)!r} and "
                    f"{format_path(newest.directory)} {now.get(key)!r}; choose --last so that all "
                    "checkpoints are of one network"
                )


def _means(checkpoints: Sequence[Checkpoint]) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoints[-1].tensors.names():
        total = torch.zeros(checkpoints[-1].tensors.shape(name), dtype=torch.float64)
        for checkpoint in checkpoints:
            total += checkpoint.tensors.read_tensor(WEIGHT, name)
        yield name, total / len(checkpoints)
