"""Sharded storage of named tensors, which a run with any parallel layout can read.

A box is a rectangular region of a tensor, e.g. a tensor-parallel shard. A piece is a contiguous
range of a flattened box. Each rank writes its pieces into one safetensors file, whose header lists
their positions. A reader assembles any box from the pieces.

``torch.distributed.checkpoint`` is not used, because reading its pickled metadata can run code.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_manifest import FileEntry
from diffmegatron.checkpoint.tensor_file import TensorFile, write_safetensors
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, parse_json, shorten
from diffmegatron.model.parameter_shards import Shard
from diffmegatron.section import CountOrZero

WEIGHT = "weight"
TENSOR_KINDS = (WEIGHT, "exp_avg", "exp_avg_sq")
"""Kinds of stored tensors: a parameter's float32 master weight and Adam's two moments.

Frozen parameters, and all parameters in a weights-only checkpoint, have only the weight. Matrices
that Muon trains have its momentum as "exp_avg", and no "exp_avg_sq".
"""
RANDOM_PREFIX = "random."
"""Prefix of the names of a rank's random states, which are uint8 [n]."""
_PIECES = "pieces"

_Axes = Annotated[tuple[CountOrZero, ...], Field(max_length=8)]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""A rectangular region of a tensor: (first index, shape), each with one number per axis."""


@dataclass(frozen=True)
class Place:
    """Position of a piece: elements [start, start + numel) of a flattened box of a named tensor.

    Attributes:
        global_shape: shape of the unsharded tensor.
        offset: first index of the box in the unsharded tensor, per axis.
        shape: shape of the box.
        start: index of the first element in the flattened box (row-major order).
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    global_shape: _Axes
    offset: _Axes
    shape: _Axes
    start: CountOrZero
    numel: Annotated[int, Field(ge=1, lt=2**63)]

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ValueError("global_shape, offset and shape have different lengths")
        axes = zip(self.offset, self.shape, self.global_shape, strict=True)
        if any(offset + size > whole for offset, size, whole in axes):
            raise ValueError("the box is not within the tensor")
        if self.start + self.numel > math.prod(self.shape):
            raise ValueError("the range is not within the box")

    @property
    def box(self) -> Box:
        """Offset and shape of the box."""
        return self.offset, self.shape


@dataclass(frozen=True)
class Piece:
    """A range of n elements of a flattened shard, stored by one rank.

    Attributes:
        start: index of the first element in the flattened shard.
        tensors: kind -> values [n]; :data:`TENSOR_KINDS` lists the kinds.
    """

    shard: Shard
    start: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Stored:
    """A piece in a file; ``index`` is its number in the file's list of pieces."""

    place: Place
    file: TensorFile
    index: int
    kinds: tuple[str, ...]


def pieces_of(shards: Iterable[Shard], start: int, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Split a range of a flattened parameter into pieces, one per shard that the range overlaps.

    Most parameters have one shard. SwiGLU's fused gate and up projection has two shards: the rank's
    gate rows and its up rows, which are not adjacent in the unsharded tensor.

    ``start`` is the index of the range's first element in the flattened parameter. ``tensors`` maps
    each kind (see :data:`TENSOR_KINDS`) to the values of the range, a 1-D tensor.
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
    """Return the tensors that a rank writes, by name, and the JSON description of its pieces.

    ``extra`` contains further tensors to write, such as random states.
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
    """Write the result of :func:`named_tensors` (CPU tensors); return the file's manifest entry."""
    return write_safetensors(path, tensors, {_PIECES: description})


class ShardedReader:
    """Reader of rank files; the pieces of a tensor must cover each element exactly once."""

    def __init__(self, directory: Path, files: Iterable[str]) -> None:
        self._directory = directory
        self.files = {name: TensorFile(directory / name) for name in files}
        self._boxes: dict[str, dict[Box, list[_Stored]]] = {}
        for file in self.files.values():
            for piece in _pieces_in(file):
                boxes = self._boxes.setdefault(piece.place.name, {})
                boxes.setdefault(piece.place.box, []).append(piece)
        for boxes in self._boxes.values():
            places = [stored.place for box in boxes.values() for stored in box]
            check_tiling(places, format_path(directory))

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._boxes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the unsharded shape of a tensor."""
        return self._first(name).place.global_shape

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return the :data:`TENSOR_KINDS` stored for a tensor, of which the first is the weight."""
        return self._first(name).kinds

    def read_tensor(self, kind: str, name: str) -> Tensor:
        """Return an unsharded tensor in float32; ``kind`` is one of :data:`TENSOR_KINDS`."""
        shape = self.shape(name)
        return self.read_box(kind, name, (0,) * len(shape), shape)

    def read_box(
        self, kind: str, name: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        """Return a box of a tensor in float32; ``kind`` is one of :data:`TENSOR_KINDS`.

        ``offset`` is the first index of the box in the unsharded tensor, per axis.
        """
        whole = self.shape(name)
        if len(shape) != len(whole) or any(
            first + size > end for first, size, end in zip(offset, shape, whole, strict=True)
        ):
            raise UserError(
                f"{format_path(self._directory)} has {name} with shape {list(whole)}, which does "
                f"not contain a box {list(shape)} at {list(offset)}; give a checkpoint of this "
                "model"
            )
        wanted = torch.empty(shape)
        for box, pieces in self._boxes[name].items():
            overlap = _overlap((offset, shape), box)
            if overlap is not None:
                to, source = overlap
                if any(kind not in piece.kinds for piece in pieces):
                    raise UserError(
                        f"{format_path(self._directory)} has no {kind} of {name}, which was "
                        "frozen or trained by Muon; start a new run from it with "
                        "checkpoint.start_from"
                    )
                wanted[to] = _join(kind, box[1], pieces)[source]
        return wanted

    def read_rank_tensor(self, file: str, name: str) -> Tensor | None:
        """Return an additional tensor of a rank file, such as a random state; None if missing."""
        if file not in self.files or name not in self.files[file].tensors:
            return None
        return torch.tensor(self.files[file].array(name))

    def _first(self, name: str) -> _Stored:
        if name not in self._boxes:
            raise UserError(
                f"{format_path(self._directory)} has no tensor {name}; give a checkpoint of this "
                "model"
            )
        return next(iter(self._boxes[name].values()))[0]


def _pieces_in(file: TensorFile) -> list[_Stored]:
    """Return the pieces in a file.

    The file must contain all tensors of its pieces. Every other tensor must be a random state.
    """
    path = format_path(file.path)
    places: list[Place] = parse_json(file.metadata.get(_PIECES, ""), list[Place], path)
    pieces = []
    for index, place in enumerate(places):
        last = max(
            (n for n, kind in enumerate(TENSOR_KINDS) if f"{kind}.{index}" in file.tensors),
            default=0,
        )
        pieces.append(_Stored(place, file, index, TENSOR_KINDS[: last + 1]))
    wanted = {
        f"{kind}.{piece.index}": ("F32", (piece.place.numel,))
        for piece in pieces
        for kind in piece.kinds
    }
    for name, tensor in file.tensors.items():
        is_random_state = name.startswith(RANDOM_PREFIX) and tensor.dtype == "U8"
        if not is_random_state and wanted.get(name) != (tensor.dtype, tensor.shape):
            raise UserError(
                f"{path} holds {shorten(name)}, {tensor.shape[0]} elements of {tensor.dtype}, "
                "which is not a tensor of its pieces; use another checkpoint"
            )
    if missing := wanted.keys() - file.tensors.keys():
        raise UserError(f"{path} lacks {min(missing)} of its pieces; use another checkpoint")
    return pieces


def _join(kind: str, shape: tuple[int, ...], pieces: list[_Stored]) -> Tensor:
    flat = torch.empty(math.prod(shape))
    values = flat.numpy()
    for piece in pieces:
        start = piece.place.start
        values[start : start + piece.place.numel] = piece.file.array(f"{kind}.{piece.index}")
    return flat.view(shape)


def _overlap(box: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the intersection of two boxes as indices into each of them; None if it is empty."""
    mine, theirs = [], []
    for a, n, b, m in zip(*box, *other, strict=True):
        first, last = max(a, b), min(a + n, b + m)
        if first >= last:
            return None
        mine.append(slice(first - a, last - a))
        theirs.append(slice(first - b, last - b))
    return tuple(mine), tuple(theirs)


def check_tiling(places: Sequence[Place], owner: str) -> None:
    """Check that the pieces of one tensor cover every element exactly once.

    The boxes must be the cells of a grid. ``owner`` names the checkpoint in error messages.
    """
    boxes: dict[Box, list[Place]] = {}
    for place in places:
        boxes.setdefault(place.box, []).append(place)
    name, shape = places[0].name, places[0].global_shape
    if any(place.global_shape != shape for place in places):
        raise UserError(f"{owner} stores {shorten(name)} with more than one shape")
    held, whole = sum(place.numel for place in places), math.prod(shape)
    if held != whole:
        raise UserError(
            f"{owner} holds {held} of the {whole} elements of {shorten(name)}; a rank's file is "
            "missing or belongs to another save"
        )
    if not _is_grid(list(boxes), shape) or not all(_is_gapless(box) for box in boxes.values()):
        raise UserError(
            f"{owner} holds pieces of {shorten(name)} that overlap or that no parallel layout cuts"
        )


def _is_grid(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Return whether the boxes are grid cells: on each axis, a box ends where the next starts."""
    for axis, size in enumerate(shape):
        edges = sorted({offset[axis] for offset, _ in boxes} | {size})
        following = dict(pairwise(edges))
        if any(offset[axis] + part[axis] != following.get(offset[axis]) for offset, part in boxes):
            return False
    return True


def _is_gapless(places: list[Place]) -> bool:
    end = 0
    for place in sorted(places, key=lambda each: each.start):
        if place.start != end:
            return False
        end += place.numel
    return end == math.prod(places[0].shape)
