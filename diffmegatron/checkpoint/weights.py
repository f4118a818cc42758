"""Write a checkpoint from weights, and load the weights of a checkpoint into a network."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_format import (
    BEGINNING,
    WEIGHT,
    Checkpoint,
    Position,
    finish_checkpoint,
    rank_file,
)
from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.sharded import Piece, named_tensors, write_pieces
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, os_error_text
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

    No process group is needed. The weights of at most one file are in memory at a time.

    Args:
        weights: name and value of every tensor of the network; stored in float32.
        run_dir: folder in which the folder ``checkpoints`` is created.
        position: progress of the run that trained the weights.
    """
    store = CheckpointStore(run_dir)
    directory = store.begin(position.step)
    try:
        entries: list[FileEntry] = []
        for pieces in _split_into_files(weights):
            path = directory / rank_file(len(entries))
            entries.append(write_pieces(path, *named_tensors(pieces, {})))
        finish_checkpoint(store, position, recipe, entries, "weights")
    except OSError as error:
        raise UserError(f"cannot write {format_path(directory)}: {os_error_text(error)}") from None
    return store.path(position.step)


def _split_into_files(
    weights: Iterable[tuple[str, Tensor]],
) -> Iterator[list[Piece]]:
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


@torch.no_grad()
def load_network(checkpoint: Checkpoint, recipe: Recipe, parallel_state: ParallelState) -> Network:
    """Build this rank's shard of a network for inference, with the weights of a checkpoint.

    The weights are rounded to the precision of the run that wrote the checkpoint, except parameters
    that the kind of attention declares as float32.

    Args:
        recipe: recipe with the network, and the parallel layout and precision of the inference.
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
