"""Named tensors in pieces: each rank writes what it owns, any layout reads what it needs.

Every rank writes one safetensors file of flat float32 pieces. A piece is a range of elements of a
box of a named tensor (:class:`~diffmegatron.model.parameter_shards.Shard`), which is what a ZeRO
partition of a tensor-parallel shard is; the file's header says which. A reader joins pieces to any
box, so tensor, pipeline and data-parallel sizes may differ between saving and loading, and no rank
ever holds more than one tensor more than its own.

Why not ``torch.distributed.checkpoint``: its metadata is a pickle, which executes code when read.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.checkpoint.check_pieces import Box, Place, check_tiling
from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.checkpoint.reading import TensorFile
from diffmegatron.checkpoint.writing import write_safetensors
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, parse_json, shown
from diffmegatron.model.parameter_shards import Shard

WEIGHT = "weight"
# What is saved of every element that is trained: the float32 master weight and Adam's moments. Of
# the others it is the weight alone.
KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
# What the names begin with of a rank's own tensors, each a vector of bytes.
OWN = "random."
_PIECES = "pieces"


@dataclass(frozen=True)
class Piece:
    """A range of a box's elements: where it lies, and its tensors by kind, each [n] float32."""

    shard: Shard
    start: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Stored:
    """A piece in a file; ``index`` numbers it there."""

    place: Place
    file: TensorFile
    index: int


def pieces_of(shards: Iterable[Shard], start: int, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces that a range of a flattened parameter is made of.

    Args:
        shards: the parameter's boxes.
        start: first element of the range in the flattened parameter.
        tensors: the range's values by kind, each [n].
    """
    numel = next(iter(tensors.values())).numel()
    pieces = []
    for shard in shards:
        first = max(start, shard.start)
        last = min(start + numel, shard.start + shard.numel)
        if first < last:
            held = {kind: values[first - start : last - start] for kind, values in tensors.items()}
            pieces.append(Piece(shard, first - shard.start, held))
    return pieces


def named_tensors(
    pieces: Iterable[Piece], extra: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], str]:
    """A rank's pieces, and tensors of its own under plain names, as its file will hold them.

    Returns:
        The tensors by the names they have in the file (views, nothing is copied), and the
        description of the pieces for :func:`write_pieces`.
    """
    tensors: dict[str, Tensor] = {}
    described = []
    for index, piece in enumerate(pieces):
        shard = piece.shard
        numel = next(iter(piece.tensors.values())).numel()
        place = Place(shard.name, shard.global_shape, shard.offset, shard.shape, piece.start, numel)
        described.append(asdict(place))
        tensors |= {f"{kind}.{index}": values for kind, values in piece.tensors.items()}
    return tensors | dict(extra), json.dumps(described)


def write_pieces(path: Path, tensors: Mapping[str, Tensor], description: str) -> FileEntry:
    """Write what :func:`named_tensors` gave, on the CPU by now; returns the file's entry."""
    return write_safetensors(path, tensors, {_PIECES: description})


class ShardedReader:
    """Reads boxes of named tensors from the files of a checkpoint, which are checked by headers.

    Args:
        directory: of the checkpoint.
        files: the names of its ranks' files.

    Raises:
        UserError: a file cannot be read as what :func:`write_pieces` writes, or the pieces of all
            files are not whole tensors.
    """

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        self._directory = directory
        self._files = {name: TensorFile(directory / name) for name in files}
        self._boxes: dict[str, dict[Box, list[_Stored]]] = {}
        for file in self._files.values():
            for index, place in enumerate(_places(file)):
                boxes = self._boxes.setdefault(place.name, {})
                boxes.setdefault(place.box, []).append(_Stored(place, file, index))
        for boxes in self._boxes.values():
            places = [stored.place for box in boxes.values() for stored in box]
            check_tiling(places, shown(directory))

    def check_content(self, entry: FileEntry) -> None:
        """Read one of the files whole.

        Raises:
            UserError: its checksum is not the entry's, or a number in it is not finite.
        """
        self._files[entry.name].check_content(entry)

    def names(self) -> list[str]:
        """Every named tensor."""
        return list(self._boxes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole named tensor."""
        return next(iter(self._boxes_of(name).values()))[0].place.global_shape

    def kinds(self, name: str) -> tuple[str, ...]:
        """What is there of a named tensor: the weight alone where it was not trained."""
        stored = next(iter(self._boxes_of(name).values()))[0]
        return _kinds(stored.file, stored.index)

    def whole(self, kind: str, name: str) -> Tensor:
        """A whole named tensor, float32."""
        shape = self.shape(name)
        return self.box(kind, name, (0,) * len(shape), shape)

    def box(self, kind: str, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a named tensor, float32.

        Raises:
            UserError: the tensor is not in the files, or not of that kind, or has another shape
                than the box is of.
        """
        whole = self.shape(name)
        if len(shape) != len(whole) or any(
            first + size > end for first, size, end in zip(offset, shape, whole, strict=True)
        ):
            raise UserError(
                f"{shown(self._directory)} has {name} in the shape {list(whole)}, which does not "
                f"hold {list(shape)} elements from {list(offset)} on; it is of another model"
            )
        wanted = torch.empty(shape)
        for (box_offset, box_shape), pieces in self._boxes_of(name).items():
            overlap = _overlap(offset, shape, box_offset, box_shape)
            if overlap is not None:
                to, source = overlap
                if any(kind not in _kinds(piece.file, piece.index) for piece in pieces):
                    raise UserError(
                        f"{shown(self._directory)} has no {kind} of {name}, which was not trained; "
                        "start a new run from it with checkpoint.start_from"
                    )
                wanted[to] = _join(kind, box_shape, pieces)[source]
        return wanted

    def extra(self, file: str, name: str) -> Tensor | None:
        """A tensor that a rank wrote under a plain name, or None."""
        if file not in self._files or name not in self._files[file].tensors:
            return None
        return torch.tensor(self._files[file].array(name))

    def _boxes_of(self, name: str) -> dict[Box, list[_Stored]]:
        if name not in self._boxes:
            raise UserError(
                f"{shown(self._directory)} has no tensor {name}; it is of another model"
            )
        return self._boxes[name]


def _places(file: TensorFile) -> list[Place]:
    """What a file's header says of its pieces, every tensor of which is there and as it should be.

    Raises:
        UserError: it is not.
    """
    path = shown(file.path)
    places: list[Place] = parse_json(file.metadata.get(_PIECES, ""), list[Place], path)
    wanted = {
        f"{kind}.{index}": ("F32", (place.numel,))
        for index, place in enumerate(places)
        for kind in _kinds(file, index)
    }
    for name, tensor in file.tensors.items():
        own = name.startswith(OWN) and tensor.dtype == "U8"
        if not own and wanted.get(name) != (tensor.dtype, tensor.shape):
            raise UserError(
                f"{path} holds {clipped(name)}, {tensor.shape[0]} elements of {tensor.dtype}, "
                "which is no tensor that its pieces have"
            )
    if missing := wanted.keys() - file.tensors.keys():
        raise UserError(f"{path} lacks {min(missing)}, a tensor that its pieces have")
    return places


def _kinds(file: TensorFile, index: int) -> tuple[str, ...]:
    """What a piece has: all kinds if it has any but the weight."""
    is_trained = any(f"{kind}.{index}" in file.tensors for kind in KINDS if kind != WEIGHT)
    return KINDS if is_trained else (WEIGHT,)


def _join(kind: str, shape: tuple[int, ...], pieces: list[_Stored]) -> Tensor:
    """The box that the pieces are the ranges of."""
    flat = torch.empty(math.prod(shape))
    values = flat.numpy()
    for piece in pieces:
        start = piece.place.start
        values[start : start + piece.place.numel] = piece.file.array(f"{kind}.{piece.index}")
    return flat.view(shape)


def _overlap(
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    other_offset: tuple[int, ...],
    other_shape: tuple[int, ...],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where two boxes meet, as indices into the one and into the other; None if nowhere."""
    mine, theirs = [], []
    for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True):
        first, last = max(a, b), min(a + n, b + m)
        if first >= last:
            return None
        mine.append(slice(first - a, last - a))
        theirs.append(slice(first - b, last - b))
    return tuple(mine), tuple(theirs)
