"""Named tensors in pieces: each rank writes what it owns, any layout reads what it needs.

Every rank writes one safetensors file of flat float32 pieces. A piece is a run of elements of a
box of a named tensor (:class:`~diffmegatron.model.shards.Shard`), which is what a ZeRO partition
of a tensor-parallel shard is; the file's header says which. A reader joins pieces to any box, so
tensor, pipeline and data-parallel sizes may differ between saving and loading, and no rank ever
holds more than one tensor more than its own.

Why not ``torch.distributed.checkpoint``: its metadata is a pickle, which executes code when read.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffmegatron.checkpoint.manifest import FileEntry
from diffmegatron.checkpoint.writing import write_safetensors
from diffmegatron.errors import UserError
from diffmegatron.model.shards import Shard

_PIECES = "pieces"
# How a pickle of protocol 2 to 5 begins, and a zip archive, which is what torch.save writes.
# A safetensors file begins with the length of its header, which neither can be.
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK")


@dataclass(frozen=True)
class Piece:
    """A run of a box's elements: where it stands, and its tensors by kind, each [n] float32."""

    shard: Shard
    start: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class _Stored:
    """A piece as a file's header describes it; ``index`` numbers it within the file."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    numel: int
    file: str
    index: int


def pieces_of(shards: Iterable[Shard], start: int, tensors: Mapping[str, Tensor]) -> list[Piece]:
    """The pieces that a run of a flattened parameter is made of.

    Args:
        shards: the parameter's boxes.
        start: first element of the run in the flattened parameter.
        tensors: the run's values by kind, each [n].
    """
    numel = next(iter(tensors.values())).numel()
    pieces = []
    for shard in shards:
        first = max(start, shard.start)
        last = min(start + numel, shard.start + shard.numel)
        if first < last:
            run = {kind: values[first - start : last - start] for kind, values in tensors.items()}
            pieces.append(Piece(shard, first - shard.start, run))
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
        described.append(
            {
                "name": shard.name,
                "global_shape": shard.global_shape,
                "offset": shard.offset,
                "shape": shard.shape,
                "start": piece.start,
                "numel": next(iter(piece.tensors.values())).numel(),
            }
        )
        tensors |= {f"{kind}.{index}": values for kind, values in piece.tensors.items()}
    return tensors | dict(extra), json.dumps(described)


def write_pieces(path: Path, tensors: Mapping[str, Tensor], description: str) -> FileEntry:
    """Write what :func:`named_tensors` gave, on the CPU by now; returns the file's entry."""
    return write_safetensors(path, tensors, {_PIECES: description})


class ShardedReader:
    """Reads boxes of named tensors from the files of a checkpoint.

    Raises:
        UserError: a file cannot be read as what :func:`write_pieces` writes.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = {}
        self._stored: dict[str, list[_Stored]] = {}
        for path in paths:
            try:
                self._refuse_pickle(path)
                self._files[path.name] = safe_open(path, framework="pt")
                header = json.loads((self._files[path.name].metadata() or {})[_PIECES])
                for index, entry in enumerate(header):
                    stored = _described(entry, path.name, index)
                    self._stored.setdefault(stored.name, []).append(stored)
            except UserError:
                raise
            except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
                raise UserError(f"{path} is not a readable checkpoint file: {error}") from None

    @staticmethod
    def _refuse_pickle(path: Path) -> None:
        """Name the one kind of file that would be worse than unreadable."""
        with path.open("rb") as stream:
            beginning = stream.read(2)
        if beginning in _PICKLES:
            raise UserError(
                f"{path} is a pickle, which can run any program when it is read; checkpoints "
                "consist of safetensors and JSON only"
            )

    def names(self) -> list[str]:
        """Every named tensor."""
        return list(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole named tensor."""
        return self._pieces(name)[0].global_shape

    def whole(self, kind: str, name: str) -> Tensor:
        """A whole named tensor, float32."""
        shape = self.shape(name)
        return self.box(kind, name, (0,) * len(shape), shape)

    def box(self, kind: str, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A box of a named tensor, float32.

        Raises:
            UserError: the files do not hold all of it.
        """
        wanted = torch.empty(shape)
        filled = 0
        boxes: dict[tuple, list[_Stored]] = {}
        for piece in self._pieces(name):
            boxes.setdefault((piece.offset, piece.shape), []).append(piece)
        for (box_offset, box_shape), pieces in boxes.items():
            overlap = _overlap(offset, shape, box_offset, box_shape)
            if overlap is None:
                continue
            to, source = overlap
            part = self._join(kind, name, box_shape, pieces)[source]
            wanted[to] = part
            filled += part.numel()
        if filled != wanted.numel():
            raise UserError(
                f"the checkpoint holds {filled} of the {wanted.numel()} elements of {name} that "
                "were asked for; it is not complete or of another model"
            )
        return wanted

    def extra(self, file: str, name: str) -> Tensor | None:
        """A tensor that a rank wrote under a plain name, or None."""
        if file not in self._files or name not in self._files[file].keys():  # noqa: SIM118
            return None
        return self._files[file].get_tensor(name)

    def _pieces(self, name: str) -> list[_Stored]:
        if name not in self._stored:
            raise UserError(f"the checkpoint has no tensor {name}; it is of another model")
        return self._stored[name]

    def _join(self, kind: str, name: str, shape: tuple[int, ...], pieces: list[_Stored]) -> Tensor:
        flat = torch.empty(math.prod(shape))
        filled = 0
        for piece in pieces:
            run = slice(piece.start, piece.start + piece.numel)
            flat[run] = self._files[piece.file].get_tensor(f"{kind}.{piece.index}")
            filled += piece.numel
        if filled != flat.numel():
            raise UserError(
                f"the checkpoint holds {filled} of {flat.numel()} elements of a part of {name}; "
                "a rank's file is missing"
            )
        return flat.view(shape)


def _described(entry: dict, file: str, index: int) -> _Stored:
    return _Stored(
        name=str(entry["name"]),
        global_shape=tuple(entry["global_shape"]),
        offset=tuple(entry["offset"]),
        shape=tuple(entry["shape"]),
        start=int(entry["start"]),
        numel=int(entry["numel"]),
        file=file,
        index=index,
    )


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
