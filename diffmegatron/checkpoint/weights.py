"""Write weights as a checkpoint, average checkpoints, or load a checkpoint into a network."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_format import (
    BEGINNING,
    WEIGHT,
    Checkpoint,
    Position,
    finish_checkpoint,
    open_checkpoint,
    rank_file,
)
from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.checkpoint.checkpoint_store import CHECKPOINTS, CheckpointStore
from diffmegatron.checkpoint.sharded import Piece, named_tensors, write_pieces
from diffmegatron.checkpoint.stage_folders import last_stage
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import model_keys
from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path
from diffmegatron.model.build import DTYPES, build_model
from diffmegatron.model.network import Network, declared_parameter
from diffmegatron.model.parameter_shards import Shard, parameter_shards
from diffmegatron.parallel.parallel_state import ParallelState

_MAX_FILE_BYTES = 1 << 30


def write_checkpoint(
    weights: Iterable[tuple[str, Tensor]],
    recipe: Recipe,
    run_dir: Path,
    *,
    position: Position = BEGINNING,
) -> Path:
    """Write unsharded weights as a checkpoint from which runs can start; return its directory.

    No process group is needed. ``position`` is the progress of the run that trained the weights.
    """
    store = CheckpointStore(run_dir)
    directory = store.begin(position.step)
    try:
        with explain_os_errors(f"cannot write {format_path(store.path(position.step))}"):
            entries: list[FileEntry] = []
            for pieces in _split_into_files(weights):
                path = directory / rank_file(len(entries))
                entries.append(write_pieces(path, *named_tensors(pieces, {})))
            finish_checkpoint(store, position, recipe, entries, "weights")
    except BaseException:
        store.abandon(position.step)
        raise
    return store.path(position.step)


def _split_into_files(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[Piece]]:
    """Yield one list of pieces per file; each piece is a complete tensor."""
    pieces: list[Piece] = []
    num_bytes = 0
    for name, tensor in weights:
        values = tensor.detach().to("cpu", torch.float32).contiguous()
        if pieces and num_bytes + values.nbytes > _MAX_FILE_BYTES:
            yield pieces
            pieces, num_bytes = [], 0
        shape = tuple(values.shape)
        whole = Shard(name, shape, (0,) * len(shape), shape, start=0, is_primary=True)
        pieces.append(Piece(whole, 0, {WEIGHT: values.flatten()}))
        num_bytes += values.nbytes
    yield pieces


def average_checkpoints(run_dir: Path, last: int, out: Path) -> Path:
    """Write the mean weights of the ``last`` newest checkpoints; return the new checkpoint's path.

    In a run with stages, the checkpoints of the last stage are averaged. The new checkpoint has the
    recipe and progress of the newest averaged one. ``out`` must not contain checkpoints yet.
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


@torch.no_grad()
def load_network(checkpoint: Checkpoint, recipe: Recipe, parallel_state: ParallelState) -> Network:
    """Build this rank's shard of a network for inference, with the weights of a checkpoint.

    The weights are rounded to the precision in the checkpoint's recipe, except parameters that the
    attention declares as float32. ``recipe`` sets the parallel layout and precision of inference.
    """
    precision = DTYPES[checkpoint.recipe.training.precision]
    network = build_model(recipe, parallel_state, initial_weights=False).eval()
    network.at_step(checkpoint.state["step"])
    for parameter, shards in parameter_shards(network).items():
        for shard in shards:
            declared = declared_parameter(shard.name, recipe.model)
            is_exact = declared is not None and declared.float32
            value = checkpoint.tensors.read_box(WEIGHT, shard.name, shard.offset, shard.shape)
            shard.view(parameter.data).copy_(value.to(torch.float32 if is_exact else precision))
    return network
